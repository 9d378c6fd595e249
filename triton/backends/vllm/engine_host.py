"""The vLLM engine of one model: its arguments, its event loop, its processes.

vLLM runs its engine in a process of its own (and workers below that). They must never outlive
this one, however it ends: the kernel kills the engine with us (die_with_parent.sh), vLLM's
workers watch their engine, and we die with Triton (ServerDeath).
"""

import asyncio
import contextlib
import ctypes
import json
import multiprocessing.spawn
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import decode_stream
import psutil
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.usage.usage_lib import UsageContext
from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import Executor
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.structured_output.backend_guidance import GuidanceBackend

# Room of the CPU's key-value cache when model.json names none: this many sequences of full
# length, within these bytes, and never more than a quarter of the memory that is free.
CPU_CACHE_SEQUENCES = 32
CPU_CACHE_BYTES = (16 << 20, 4 << 30)
BLOCK_TOKENS = 128  # vLLM's block size on a CPU; every sequence fills whole blocks
PR_SET_PDEATHSIG = 1  # of prctl(2)


def pin_gpus(kind: str, device_id: str, parameters: dict[str, str]) -> None:
    """Give a GPU instance the devices that config.pbtxt names; without a GPU nothing to do."""
    devices = parameters.get("GPU_DEVICE_IDS") if kind == "MODEL" else None
    if kind == "GPU":
        devices = device_id
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices


class SchedulerLoad(StatLoggerBase):
    """Keeps the last number of running requests that vLLM's scheduler reported."""

    running = 0

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        pass

    def record(self, scheduler_stats: Any, *_: Any, **_more: Any) -> None:
        if scheduler_stats is not None:
            self.running = scheduler_stats.num_running_reqs

    def log_engine_initialized(self) -> None:
        pass


class EngineHost:
    """Owns the engine and the thread with the event loop it lives on."""

    engine: AsyncLLM

    def __init__(self, model_dir: str) -> None:
        """Returns when the engine is ready; raises its own error when it cannot start."""
        arguments = json.loads((Path(model_dir) / "model.json").read_text())
        self.lora_paths: dict[str, str] = {}
        if str(arguments.get("enable_lora", False)).lower() == "true":
            arguments["enable_lora"] = True
            self.lora_paths = json.loads((Path(model_dir) / "multi_lora.json").read_text())
            if current_platform.is_cpu():
                arguments["max_loras"] = choose_slots(arguments, len(self.lora_paths))
        self.config = make_config(arguments)
        self.default_sampling = read_default_sampling(self.config)
        self.log_requests = bool(arguments.get("enable_log_requests", False))
        self.load = SchedulerLoad(self.config)
        self.server_death = ServerDeath()
        self.loop = asyncio.new_event_loop()
        # The engine process dies with the thread that started it, so that thread is this one,
        # which runs until close().
        self.thread = threading.Thread(target=self.run_loop, name="vllm-loop")
        self.thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self.start_engine(), self.loop).result()
        except BaseException:
            self.stop_loop()
            raise

    @property
    def max_model_len(self) -> int:
        return self.config.model_config.max_model_len

    @property
    def pools(self) -> bool:
        """True for a model that computes embeddings or scores, and generates no text."""
        return str(self.config.model_config.runner_type) == "pooling"

    @property
    def takes_images(self) -> bool:
        return bool(self.config.model_config.is_multimodal_model)

    @property
    def is_dead(self) -> bool:
        return self.engine.errored

    def run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    async def start_engine(self) -> None:
        spawn_children_that_die_with_us()
        decode_stream.install()
        self.engine = AsyncLLM(
            vllm_config=self.config,
            executor_class=Executor.get_class(self.config),
            log_stats=False,
            log_requests=self.log_requests,
            stat_loggers=[lambda _config, _index: self.load],
        )

    def close(self) -> None:
        # vLLM first asks its processes and waits; there is nothing left to save in them.
        for process in psutil.Process().children(recursive=True):
            process.kill()
        self.engine.shutdown(timeout=0)
        self.stop_loop()

    def stop_loop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class ServerDeath:
    """Ends this process with Triton's, which a stub only tries when its server was killed: it may
    wait for the dead server's answer indefinitely, with the interpreter lock held.

    The kernel ends it then, once asked. It takes the end of a thread for the end of the parent, and
    the thread that started us ends once the model is loaded; then we are the child of the server's
    first thread, which ends last. Until then, while nothing waits for the server, we look.
    """

    def __init__(self) -> None:
        self.server = os.getppid()
        self.is_asked = False
        threading.Thread(target=self.look, daemon=True).start()

    def look(self) -> None:
        while os.getppid() == self.server:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    def ask(self) -> None:
        """Call it before each exchange with the server, from a thread that lasts: what was asked
        ends with the thread."""
        if self.is_asked:
            return
        children = Path(f"/proc/{self.server}/task/{self.server}/children")
        with contextlib.suppress(OSError):  # the server has ended, or the kernel does not report it
            if str(os.getpid()) in children.read_text().split():
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                self.is_asked = True
        if os.getppid() != self.server:  # it ended just before
            os.kill(os.getpid(), signal.SIGKILL)


def make_config(arguments: dict[str, Any]) -> VllmConfig:
    """Every key of model.json is an argument of vLLM's engine; raises on an unknown one."""
    if current_platform.is_cpu():
        arguments = {"enforce_eager": True} | arguments
        if arguments["enforce_eager"]:
            # Some of vLLM's functions (log probabilities) ask for torch.compile even so: many
            # seconds inside the first such request, and a C++ compiler to be installed.
            os.environ["TORCHDYNAMO_DISABLE"] = "1"
        if "distributed_executor_backend" not in arguments and is_single_process(arguments):
            # The worker inside the engine's process: a third of memory and start time less.
            # By this variable vLLM accepts that OMP_NUM_THREADS is set outside.
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            arguments["distributed_executor_backend"] = "uni"
    config = AsyncEngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
    choose_constraints(config)
    if current_platform.is_cpu() and not config.cache_config.kv_cache_memory_bytes:
        config.cache_config.kv_cache_memory_bytes = choose_cache_bytes(config)
    return config


def choose_constraints(config: VllmConfig) -> None:
    """Structured outputs by llguidance, where model.json does not choose.

    Its time per token is bounded. That of xgrammar, which vLLM would choose, grows with each token of a
    regular expression such as `((a*)*)*b`, inside the step that all requests share.
    """
    chosen, model = config.structured_outputs_config, config.model_config
    if chosen.backend != "auto" or model.runner_type == "pooling" or model.skip_tokenizer_init:
        return
    if GuidanceBackend.is_tokenizer_supported(cached_tokenizer_from_config(model)):
        chosen.backend = "guidance"


def read_default_sampling(config: VllmConfig) -> dict[str, Any]:
    """The sampling parameters of the model's generation_config.json, as vLLM's server applies them.

    Empty with `"generation_config": "vllm"` in model.json. Its length is no default: clients name
    max_tokens.
    """
    defaults = config.model_config.get_diff_sampling_param()
    defaults.pop("max_tokens", None)
    return defaults


def choose_slots(arguments: dict[str, Any], adapters: int) -> int:
    """One slot more than adapters, which fill them from the first: the last one stays empty. vLLM's CPU
    kernels give the last slot's adapter to tokens that have none."""
    return max(int(arguments.get("max_loras", 1)), adapters + 1)


def is_single_process(arguments: dict[str, Any]) -> bool:
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    return all(int(arguments.get(size, 1)) == 1 for size in sizes)


def choose_cache_bytes(config: VllmConfig) -> int:
    model, parallel = config.model_config, config.parallel_config
    token_bytes = (
        2
        * model.get_num_layers(parallel)
        * model.get_num_kv_heads(parallel)
        * model.get_head_size()
        * get_dtype_size(model.dtype)
    )
    blocks = -(-model.max_model_len // BLOCK_TOKENS)
    sequences = min(CPU_CACHE_SEQUENCES, config.scheduler_config.max_num_seqs)
    # vLLM keeps one block for itself: without another, one sequence alone would not fit.
    wanted = token_bytes * BLOCK_TOKENS * (blocks * sequences + 1)
    least, most = CPU_CACHE_BYTES
    return max(least, min(wanted, most, psutil.virtual_memory().available // 4))


def spawn_children_that_die_with_us() -> None:
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ["LLM_ENGINE_PYTHON"] = sys.executable
    os.environ["LLM_ENGINE_PARENT"] = str(os.getpid())
    wrapper = Path(__file__).with_name("die_with_parent.sh")
    multiprocessing.spawn.set_executable(str(wrapper))
