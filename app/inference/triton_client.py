"""Triton over gRPC: the only importer of grpc; `triton_messages` builds and reads its messages.

One bidirectional stream per generation, so that cancelling the call reaches the engine and an
error belongs to one request.
"""

import asyncio
import contextlib
import math
import re
import struct
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any
from uuid import uuid4

import grpc
from tritonclient.grpc import service_pb2 as pb, service_pb2_grpc

from app.core.errors import NotFoundError, TritonError, TritonUnavailableError
from app.core.settings.fields import split_address
from app.inference.triton_errors import (
    GenerationError,
    ModelFailedError,
    NotTakenError,
    StreamLostError,
    to_model_error,
)
from app.inference.triton_messages import (
    CANCEL_INPUT,
    RESUME_INPUT,
    Delta,
    EarlierText,
    build_cancellation,
    build_request,
    read_response,
)

_CONTROL_TIMEOUT = 10.0  # seconds for calls that only ask
_LOAD_TIMEOUT = 600.0  # seconds for a model to load or unload
_CANCEL_SECONDS = 5.0  # for a model to end a stream that it was asked to end
_LEAVE_SECONDS = 2 * _CANCEL_SECONDS  # for calls on a connection that is given up

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Else channels to one address share their connections, so that a new one might be an old one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the time that one attempt to connect may take: a busy or distant server needs some.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Triton's server takes more frequent pings on a silent stream for abuse (its minimum: 300 s).
    ("grpc.keepalive_time_ms", 301_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]


class CannotContinueError(GenerationError):
    """The model takes no text to continue: it has no input `resume_token_ids`."""


class _InputsChangedError(GenerationError):
    """The model has other inputs than when it was last asked: it was reloaded."""


@dataclass(slots=True, frozen=True)
class IndexEntry:
    """One model of Triton's repository index."""

    name: str
    version: int | None
    ready: bool
    reason: str
    engine_dead_since: datetime | None = None  # found by probes, not by Triton


# Triton's own words: https://github.com/triton-inference-server/core, src/infer_request.cc
_UNEXPECTED = re.compile(r"unexpected inference (input|output)")
# A model without `resume_token_ids` is asked again after this time, as it may have been reloaded. One
# that loses the input refuses it.
_INPUTS_SECONDS = 60.0


class TritonClient:
    """A channel to one Triton server. Use it inside `async with`."""

    def __init__(self, address: str) -> None:
        host, port = split_address(address, 8001)
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._takes_cancellations: dict[str, bool] = {}  # by model
        self._takes_resumes: dict[str, tuple[bool, float]] = {}  # by model; when it was asked
        self._unheard: set[asyncio.Task[None]] = set()  # calls that nobody listens to any more

    async def __aenter__(self) -> "TritonClient":
        self._connect()
        return self

    def _connect(self) -> None:
        self._channel = grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        # The method takes a stream of requests. One message and the end of the stream look the
        # same on the wire, and cost less CPU time when they are sent as a unary request.
        self._infer = self._channel.unary_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )

    async def reconnect(self) -> None:
        """Use a new connection from now on; calls under way end on the old one.

        A connection whose other end is gone without a word is found dead by its keepalive after five
        minutes only.
        """
        old = self._channel
        self._connect()
        closing = asyncio.create_task(old.close(_LEAVE_SECONDS))
        self._unheard.add(closing)
        closing.add_done_callback(self._unheard.discard)

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self._unheard:
            await asyncio.wait(self._unheard, timeout=_CANCEL_SECONDS)
        await self._channel.close()

    async def run(
        self,
        model: str,
        prompt: str,
        parameters: dict[str, Any],
        on_delta: Callable[[Delta], None],
        traceparent: str | None = None,
        *,
        wants_ids: bool = False,
        earlier: EarlierText | None = None,
    ) -> None:
        """Have a model generate, and call `on_delta` with each response until the last token.

        `wants_ids`: with the ids of its tokens, where the model returns them. `earlier`: the rest of
        that text alone. Cancelling this stops the engine's work. Raises a GenerationError: which one
        decides whether the attempt counts.
        """
        for _ in range(2):
            returns_ids = wants_ids and await self._takes_resume(model, is_needed=bool(earlier))
            if earlier is not None and not returns_ids:
                raise CannotContinueError(f"model {model} has no input {RESUME_INPUT}")
            try:
                return await self._run(
                    *(model, prompt, parameters, on_delta, traceparent),
                    returns_ids=returns_ids,
                    earlier=earlier,
                )
            except _InputsChangedError:
                self._takes_resumes.pop(model, None)
        raise NotTakenError(f"the inputs of model {model} change")

    async def _run(
        self,
        model: str,
        prompt: str,
        parameters: dict[str, Any],
        on_delta: Callable[[Delta], None],
        traceparent: str | None,
        *,
        returns_ids: bool,
        earlier: EarlierText | None,
    ) -> None:
        request_id = uuid4().hex
        # Triton reads it where it traces (--trace-config mode=opentelemetry).
        metadata = None if traceparent is None else (("traceparent", traceparent),)
        request = build_request(
            model, prompt, parameters, request_id, returns_ids=returns_ids, earlier=earlier
        )
        call = self._infer(request, metadata=metadata)
        told = asyncio.get_running_loop().create_future()
        # gRPC cancels a call at once when the task that reads it is cancelled: that is not ours.
        reading = asyncio.create_task(_read(call, on_delta, told))
        has_ended = False  # as the model has told: it need not hear that nobody listens
        try:
            await told
            has_ended = True
        except GenerationError as error:
            has_ended = True
            if returns_ids and _UNEXPECTED.search(str(error)):
                raise _InputsChangedError(str(error)) from error
            raise
        finally:
            if not told.cancelled():
                told.exception()  # seen, also when we were cancelled in the same step
            if not reading.done():
                self._leave(call, reading, model, None if has_ended else request_id)

    async def generate(
        self, model: str, prompt: str, parameters: dict[str, Any]
    ) -> AsyncGenerator[Delta, None]:
        """The same as an iterator. Closing or cancelling it stops the engine's work."""
        deltas: asyncio.Queue[Delta | None] = asyncio.Queue()
        running = asyncio.create_task(self.run(model, prompt, parameters, deltas.put_nowait))
        running.add_done_callback(lambda _: deltas.put_nowait(None))
        try:
            while (delta := await deltas.get()) is not None:
                yield delta
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def _leave(
        self, call: Any, reading: "asyncio.Task[None]", model: str, request_id: str | None
    ) -> None:
        """Let a call end by itself; a request that still runs has to be ended by its model."""
        self._unheard.add(reading)
        reading.add_done_callback(self._unheard.discard)
        deadline = asyncio.get_running_loop().call_later(_CANCEL_SECONDS, call.cancel)
        reading.add_done_callback(lambda _: deadline.cancel())
        if request_id is not None:
            ending = asyncio.create_task(self._end(call, model, request_id))
            self._unheard.add(ending)
            ending.add_done_callback(self._unheard.discard)

    async def _end(self, call: Any, model: str, request_id: str) -> None:
        """Have the model end a request, which ends its call.

        Cancelling a call that Triton 2.51 is answering crashes the server about once in a
        thousand times, and otherwise holds the model when it is to be unloaded. Models that take
        no cancellations (NVIDIA's backend, in newer servers without that fault) have the call
        cancelled at once.
        """
        with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError):
            async with asyncio.timeout(_CANCEL_SECONDS):
                if await self._takes_cancellation(model):
                    message = build_cancellation(model, request_id)
                    async for _ in self._stub.ModelStreamInfer(iter([message])):
                        pass
                    return
        call.cancel()

    async def _takes_cancellation(self, model: str) -> bool:
        if model not in self._takes_cancellations:
            metadata = await self._stub.ModelMetadata(pb.ModelMetadataRequest(name=model))
            names = {tensor.name for tensor in metadata.inputs}
            self._takes_cancellations[model] = CANCEL_INPUT in names
        return self._takes_cancellations[model]

    async def _takes_resume(self, model: str, *, is_needed: bool) -> bool:
        """Whether a model returns token ids and takes them again.

        False if the server does not answer; if the answer `is_needed`, NotTakenError is raised then.
        """
        now = asyncio.get_running_loop().time()
        takes, asked_at = self._takes_resumes.get(model, (False, -math.inf))
        if takes or now - asked_at < _INPUTS_SECONDS:
            return takes
        try:
            message = pb.ModelMetadataRequest(name=model)
            metadata = await self._stub.ModelMetadata(message, timeout=_CONTROL_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            if is_needed:
                raise NotTakenError(error.details() or error.code().name) from error
            return False
        takes = any(tensor.name == RESUME_INPUT for tensor in metadata.inputs)
        self._takes_resumes[model] = (takes, now)
        return takes

    async def index(self) -> list[IndexEntry]:
        """Every model in Triton's repositories; the highest version where there are several."""
        answer = await self._ask(self._stub.RepositoryIndex, pb.RepositoryIndexRequest())
        entries: dict[str, IndexEntry] = {}
        for model in answer.models:
            entry = IndexEntry(
                name=model.name,
                version=int(model.version) if model.version else None,
                ready=model.state == "READY",
                reason=model.reason,
            )
            known = entries.get(entry.name)
            if known is None or (entry.ready, entry.version or 0) > (
                known.ready,
                known.version or 0,
            ):
                entries[entry.name] = entry
        return list(entries.values())

    async def config(self, model: str) -> Any:
        """The model's configuration (a ModelConfig message)."""
        answer = await self._ask(self._stub.ModelConfig, pb.ModelConfigRequest(name=model))
        return answer.config

    async def request_count(self, model: str) -> int:
        """Requests that the model has had since it was loaded, refused and failed ones included."""
        message = pb.ModelStatisticsRequest(name=model)
        answer = await self._ask(self._stub.ModelStatistics, message)
        return sum(
            statistics.inference_count + statistics.inference_stats.fail.count
            for statistics in answer.model_stats
        )

    async def is_live(self) -> bool:
        """Whether the server answers at all."""
        try:
            answer = await self._ask(self._stub.ServerLive, pb.ServerLiveRequest())
        except (TritonUnavailableError, TritonError):
            return False
        return bool(answer.live)

    async def load(self, model: str) -> None:
        """Load a model. Raises NotFoundError or TritonError with Triton's reason."""
        await self._ask(
            self._stub.RepositoryModelLoad,
            pb.RepositoryModelLoadRequest(model_name=model),
            _LOAD_TIMEOUT,
        )

    async def unload(self, model: str) -> None:
        """Unload a model."""
        await self._ask(
            self._stub.RepositoryModelUnload,
            pb.RepositoryModelUnloadRequest(model_name=model),
            _LOAD_TIMEOUT,
        )

    async def _ask(self, method: Any, message: Any, seconds: float = _CONTROL_TIMEOUT) -> Any:
        try:
            return await method(message, timeout=seconds)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The channel was closed, which gRPC tells in this way.
            raise TritonUnavailableError(f"The server at {self.address} was removed.") from error
        except grpc.aio.AioRpcError as error:
            detail = error.details() or error.code().name
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise TritonUnavailableError(
                    f"Triton at {self.address} does not answer ({detail}).",
                    headers={"Retry-After": "5"},
                ) from error
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise NotFoundError(detail) from error
            raise TritonError(detail) from error


async def _read(call: Any, on_delta: Callable[[Delta], None], told: "asyncio.Future[None]") -> None:
    """Read a call to its end, and tell its last token, or its error, as soon as it is here.

    What comes after that, or after the consumer has left, is heard by nobody.
    """
    try:
        async for response in call:
            if not told.done():
                _hear(response, on_delta, told)
    except grpc.aio.AioRpcError as error:
        if not told.done():
            told.set_exception(_to_stream_error(error))
    finally:
        if not told.done():
            told.set_result(None)


def _hear(response: Any, on_delta: Callable[[Delta], None], told: "asyncio.Future[None]") -> None:
    if response.error_message:
        told.set_exception(to_model_error(response.error_message))
        return
    try:
        delta = read_response(response.infer_response)
    except (ValueError, struct.error) as error:
        told.set_exception(ModelFailedError(f"The model's response cannot be read: {error}."))
        return
    try:
        on_delta(delta)
    except Exception as error:  # noqa: BLE001 - a bug must reach its owner, and not end the reading
        told.set_exception(error)
    else:
        # Nothing follows but the end of the stream, a round trip later.
        if delta.finish_reason is not None:
            told.set_result(None)


_NOT_CONNECTED = re.compile(
    r"failed to connect|resolution failed|errors resolving|Connection refused"
)


def _to_stream_error(error: grpc.aio.AioRpcError) -> GenerationError:
    """What the end of a stream by gRPC itself means.

    A request that kills its engine before the first token must count as an attempt: only a
    connection that never was is known to have taken nothing.
    """
    detail = error.details() or error.code().name
    return NotTakenError(detail) if _NOT_CONNECTED.search(detail) else StreamLostError(detail)
