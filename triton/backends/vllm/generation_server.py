"""Runs the requests of one model: submits, answers, cancels, counts, and reports a dead engine."""

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton_python_backend_utils as pb_utils
from continuation import continue_generation
from engine_host import EngineHost
from generation_request import (
    GenerationRequest,
    RefusedError,
    ResponseBuilder,
    read_request,
)
from server_metrics import ServerMetrics
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.v1.engine.exceptions import EngineDeadError

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
# Each send is a round trip to Triton's process, made without the interpreter lock.
SENDERS = 4
# Seconds between two looks at cancellations, metrics and the engine. A look at one request's
# cancellation is a round trip too, so with many of them the pulse slows down.
PULSE = 0.1
PULSE_PER_REQUEST = 0.001


class ResponseStream:
    """Responses to one client. Triton frees a request at its final response, and asking about the
    cancellation of a freed one crashes the whole server: hence the lock and the flag."""

    def __init__(self, triton_request: Any) -> None:
        self.request_id = triton_request.request_id()
        self.sender = triton_request.get_response_sender()
        self.lock = threading.Lock()
        self.is_final = False

    def send(self, response: Any, is_final: bool = False) -> None:
        with self.lock:
            self.is_final = is_final
            self.sender.send(response, flags=FINAL if is_final else 0)

    def fail(self, code: str, message: str) -> None:
        # A stream's errors arrive as text alone (asked for status codes, Triton 2.51 crashes
        # under load), so the code's name goes first.
        error = pb_utils.TritonError(f"{code}: {message}", getattr(pb_utils.TritonError, code))
        self.send(pb_utils.InferenceResponse(error=error), is_final=True)

    def is_cancelled(self) -> bool:
        with self.lock:
            return not self.is_final and self.sender.is_cancelled()


class GenerationServer:
    """Requests come in on Triton's thread; everything else happens on the engine's loop."""

    def __init__(self, host: EngineHost, model_name: str, model_version: str) -> None:
        self.host = host
        self.model_name = model_name
        self.lora_ids = {name: number for number, name in enumerate(host.lora_paths, start=1)}
        self.numbers = itertools.count(1)
        self.live: dict[asyncio.Task[None], ResponseStream] = {}  # requests under way
        self.senders = ThreadPoolExecutor(SENDERS, thread_name_prefix="sender")
        self.metrics = ServerMetrics(model_name, model_version)
        self.pulse = asyncio.run_coroutine_threadsafe(self.beat(), host.loop)

    def submit(self, triton_request: Any) -> None:
        stream = ResponseStream(triton_request)
        target = pb_utils.get_input_tensor_by_name(triton_request, "cancel_request_id")
        if target is not None:
            request_id = target.as_numpy().flat[0].decode("utf-8", "replace")
            self.host.loop.call_soon_threadsafe(self.cancel, request_id)
            stream.send(None, is_final=True)
            return
        try:
            request = read_request(triton_request)
            if request.lora_name is not None and request.lora_name not in self.lora_ids:
                known = ", ".join(self.lora_ids) or "none"
                raise RefusedError(f"unknown lora_name {request.lora_name!r}; known: {known}")
        except RefusedError as error:
            stream.fail("INVALID_ARG", str(error))
            return
        self.host.loop.call_soon_threadsafe(self.start, request, stream)

    def start(self, request: GenerationRequest, stream: ResponseStream) -> None:
        task = self.host.loop.create_task(self.answer(request, stream))
        self.live[task] = stream
        task.add_done_callback(self.live.pop)

    def cancel(self, request_id: str) -> None:
        for task, stream in self.live.items():
            if stream.request_id == request_id:
                task.cancel()

    async def answer(self, request: GenerationRequest, stream: ResponseStream) -> None:
        """Exactly one final response leaves here, also after an error."""
        try:
            if await self.generate(request, stream):
                return
            code, message = "CANCELLED", "the request was cancelled"
        except (RefusedError, VLLMClientError) as error:
            code, message = "INVALID_ARG", str(error)
        except EngineDeadError:
            code, message = "UNAVAILABLE", f"the engine of model {self.model_name} died"
        except GracefulHTTPError as error:
            code, message = "UNAVAILABLE", str(error)
        except Exception as error:  # noqa: BLE001 - it is this request's alone
            cause = error.__cause__ or error
            code, message = "INTERNAL", f"{type(cause).__name__}: {cause}"
            pb_utils.Logger.log_error(f"request of model {self.model_name} failed: {message}")
        await self.in_thread(stream.fail, code, message)

    async def generate(self, request: GenerationRequest, stream: ResponseStream) -> bool:
        """False when the client cancelled. Awaiting each send is the backpressure: meanwhile
        vLLM joins further tokens into the next output."""
        outputs = None
        try:
            prompt, input_tokens = await self.render(request)
            self.metrics.prompt_tokens += input_tokens
            builder = ResponseBuilder(request, input_tokens)
            lora = None
            if (name := request.lora_name) is not None:
                lora = LoRARequest(name, self.lora_ids[name], self.host.lora_paths[name])
            request_id = f"{self.model_name}-{next(self.numbers)}"
            outputs = self.start_engine(request, prompt, request_id, lora)
            finished = False
            async for output in outputs:
                before = builder.output_tokens
                response = builder.build(output)
                self.metrics.generation_tokens += builder.output_tokens - before
                finished = output.finished
                await self.in_thread(stream.send, response, finished)
            if not finished:
                await self.in_thread(stream.send, None, True)
        except asyncio.CancelledError:
            return False
        finally:
            if outputs is not None:
                await outputs.aclose()  # a cancelled one aborts in the engine
        return True

    def start_engine(
        self,
        request: GenerationRequest,
        prompt: dict[str, Any],
        request_id: str,
        lora: LoRARequest | None,
    ) -> AsyncGenerator[RequestOutput]:
        engine = self.host.engine
        if request.resumed is not None:
            return continue_generation(engine, request, prompt, request_id, lora)
        return engine.generate(
            prompt, request.sampling, request_id, prompt_text=request.prompt, lora_request=lora
        )

    async def render(self, request: GenerationRequest) -> tuple[dict[str, Any], int]:
        """The tokenized prompt and its length; raises RefusedError when it does not fit."""
        prompt: dict[str, Any] = {"prompt": request.prompt}
        if request.images:
            prompt["multi_modal_data"] = {"image": request.images}
        engine, limit = self.host.engine, self.host.max_model_len
        parsed = parse_model_prompt(self.host.config.model_config, prompt)
        (rendered,) = await engine.renderer.render_cmpl_async([parsed])
        length = len(rendered["prompt_token_ids"])
        wanted = request.sampling.max_tokens or 1
        if length + wanted > limit:
            raise RefusedError(
                f"the prompt of {length} tokens and max_tokens={wanted} together exceed the "
                f"model's length of {limit} tokens"
            )
        return rendered, length

    async def in_thread(self, function: Any, *args: Any) -> Any:
        """Run a call to Triton in a sender thread; it is completed even under cancellation, so
        that responses keep their order."""
        call = self.host.loop.run_in_executor(self.senders, function, *args)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait([call])
            raise

    async def beat(self) -> None:
        while not self.host.is_dead:
            self.host.server_death.ask()
            requests = list(self.live.items())
            cancelled = await self.in_thread(
                lambda streams: [stream.is_cancelled() for stream in streams],
                [stream for _, stream in requests],
            )
            for (task, _), is_cancelled in zip(requests, cancelled, strict=True):
                if is_cancelled:
                    task.cancel()
            running = min(self.host.load.running, len(self.live))
            await self.in_thread(self.metrics.publish, running, len(self.live) - running)
            await asyncio.sleep(PULSE + PULSE_PER_REQUEST * len(self.live))
        pb_utils.Logger.log_error(f"the engine of model {self.model_name} died: unloading it")
        # Needs --model-control-mode=explicit; answers before the unloading is done.
        await self.in_thread(pb_utils.unload_model, self.model_name)

    def close(self) -> None:
        """Triton has no request of ours under way any more."""
        self.pulse.cancel()
        self.senders.shutdown()
        self.metrics.close()
