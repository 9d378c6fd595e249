"""Runs the requests and sessions of one model: submits, answers, cancels, counts, and reports a
dead engine."""

import asyncio
from typing import Any

import triton_python_backend_utils as pb_utils
from cancellations import Cancellations
from engine_host import EngineHost
from engine_requests import EngineRequests
from generation_request import GenerationRequest, RefusedError, ResponseBuilder, read_request
from pooling import PoolingRequest, PoolingRequests, read_pooling_request
from response_stream import ResponseStream, Senders
from server_metrics import ServerMetrics
from session import PULSE
from sessions import Sessions

# Added to the pulse for each request: a look at its cancellation is a round trip, so with many of
# them the pulse slows down.
PULSE_PER_REQUEST = 0.001
CANCELLED = ("CANCELLED", "the request was cancelled")


class GenerationServer:
    """Requests come in on Triton's thread; everything else happens on the engine's loop."""

    def __init__(self, host: EngineHost, model_name: str, model_version: str) -> None:
        self.host = host
        self.model_name = model_name
        self.live: dict[asyncio.Task[None], ResponseStream] = {}  # requests under way
        self.cancellations = Cancellations()
        self.senders = Senders(host.loop)
        self.metrics = ServerMetrics(model_name, model_version)
        self.requests = EngineRequests(host, model_name, self.metrics)
        self.pooling = PoolingRequests(self.requests)
        self.sessions = Sessions(self.requests, self.senders)
        self.pulse = asyncio.run_coroutine_threadsafe(self.beat(), host.loop)

    def submit(self, triton_request: Any) -> None:
        stream = ResponseStream(triton_request)
        if pb_utils.get_input_tensor_by_name(triton_request, "session_v1") is not None:
            self.sessions.submit(triton_request, stream)
            return
        target = pb_utils.get_input_tensor_by_name(triton_request, "cancel_request_id")
        if target is not None:
            request_id = target.as_numpy().flat[0].decode("utf-8", "replace")
            self.host.loop.call_soon_threadsafe(self.cancel, request_id)
            stream.send(None, is_final=True)
            return
        pooling = pb_utils.get_input_tensor_by_name(triton_request, "pooling_request")
        request: GenerationRequest | PoolingRequest
        try:
            if pooling is not None:
                request = read_pooling_request(pooling.as_numpy().flat[0])
            else:
                request = read_request(triton_request, self.host.default_sampling)
                self.requests.check_lora(request)
        except RefusedError as error:
            stream.fail("INVALID_ARG", str(error))
            return
        self.host.loop.call_soon_threadsafe(self.start, request, stream)

    def start(self, request: GenerationRequest | PoolingRequest, stream: ResponseStream) -> None:
        if self.cancellations.take(stream.request_id):
            self.senders.start(stream.fail, *CANCELLED)
            return
        task = self.host.loop.create_task(self.answer(request, stream))
        self.live[task] = stream
        task.add_done_callback(self.forget)

    def forget(self, task: asyncio.Task[None]) -> None:
        self.cancellations.end(self.live.pop(task).request_id)

    def cancel(self, request_id: str) -> None:
        tasks = [task for task, stream in self.live.items() if stream.request_id == request_id]
        for task in tasks:
            # Behind its first step: a task that is cancelled before never runs, and answers nothing.
            self.host.loop.call_soon(task.cancel)
        if not tasks:
            self.cancellations.remember(request_id)

    async def answer(
        self, request: GenerationRequest | PoolingRequest, stream: ResponseStream
    ) -> None:
        """Exactly one final response leaves here, also after an error."""
        work = self.pool if isinstance(request, PoolingRequest) else self.generate
        try:
            if await work(request, stream):
                return
            code, message = CANCELLED
        except Exception as error:  # noqa: BLE001 - it is this request's alone
            code, message = self.requests.explain(error)
        await self.senders.run(stream.fail, code, message)

    async def generate(self, request: GenerationRequest, stream: ResponseStream) -> bool:
        """False when the client cancelled. Awaiting each send is the backpressure: meanwhile
        vLLM joins further tokens into the next output."""
        outputs = None
        try:
            prompt, input_tokens = await self.requests.render(request)
            builder = ResponseBuilder(request, input_tokens)
            outputs = self.requests.generate(request, prompt, self.requests.next_id())
            finished = False
            async for output in outputs:
                before = builder.output_tokens
                response = builder.build(output)
                self.metrics.generation_tokens += builder.output_tokens - before
                finished = output.finished
                await self.senders.run(stream.send, response, finished)
            if not finished:
                await self.senders.run(stream.send, None, True)
        except asyncio.CancelledError:
            return False
        finally:
            if outputs is not None:
                await outputs.aclose()  # a cancelled one aborts in the engine
        return True

    async def pool(self, request: PoolingRequest, stream: ResponseStream) -> bool:
        """False when the client cancelled."""
        try:
            response = await self.pooling.run(request)
            await self.senders.run(stream.send, response, True)
        except asyncio.CancelledError:
            return stream.is_final
        return True

    async def beat(self) -> None:
        while not self.host.is_dead:
            self.host.server_death.ask()
            requests = list(self.live.items())
            cancelled = await self.senders.run(
                lambda streams: [stream.is_cancelled() for stream in streams],
                [stream for _, stream in requests],
            )
            for (task, _), is_cancelled in zip(requests, cancelled, strict=True):
                if is_cancelled:
                    task.cancel()
            generations = len(self.live) + self.sessions.generations
            running = min(self.host.load.running, generations)
            await self.senders.run(self.metrics.publish, running, generations - running)
            await asyncio.sleep(PULSE + PULSE_PER_REQUEST * len(self.live))
        pb_utils.Logger.log_error(f"the engine of model {self.model_name} died: unloading it")
        # Needs --model-control-mode=explicit; answers before the unloading is done.
        await self.senders.run(pb_utils.unload_model, self.model_name)

    def close(self) -> None:
        """Triton has no request of ours under way any more."""
        self.pulse.cancel()
        self.senders.close()
        self.metrics.close()
