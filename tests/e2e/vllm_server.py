"""vLLM's own HTTP server with the demo model, for comparison."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from app.cli.up.processes import free_port
from tests.conftest import ROOT, TRITON_VENV


@contextlib.contextmanager
def run_vllm_server(directory: Path) -> Iterator[str]:
    """vLLM's own server with the demo model, with the engine's arguments of our backend."""
    port = free_port()
    command: list[str | Path] = [
        TRITON_VENV / "bin" / "python", "-m", "vllm.entrypoints.openai.api_server",
        "--model", ROOT / "models" / "demo" / "1", "--served-model-name", "demo",
        "--max-model-len", "1024", "--dtype", "float32", "--enforce-eager",
        "--kv-cache-memory-bytes", str(64 << 20), "--distributed-executor-backend", "uni",
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    threads = cores - 1 if cores > 2 else 1  # as in triton/serve.sh
    environment = {
        "PATH": f"{TRITON_VENV / 'bin'}:{os.environ['PATH']}",
        "HOME": str(directory),
        "LC_ALL": "C.UTF-8",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    log = directory / "server.log"
    with (
        log.open("w") as output,
        subprocess.Popen(
            command,
            env=environment,
            cwd=log.parent,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        url = f"http://127.0.0.1:{port}"
        try:
            wait_for(url, process, log)
            yield url
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # its engine, too


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 240
    while True:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.3)
