"""Client of one Triton server over gRPC; `triton_messages` builds and reads its messages.

Each generation has its own bidirectional stream: cancelling the call reaches the engine, and an error
belongs to one request.
"""

import asyncio
import contextlib
import math
import re
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import uuid4

import grpc
from tritonclient.grpc import service_pb2 as pb, service_pb2_grpc

from app.core.errors import NotFoundError, TritonError, TritonUnavailableError
from app.core.settings.fields import split_address
from app.inference.triton_errors import GenerationError, NotTakenError
from app.inference.triton_messages import (
    CANCEL_INPUT,
    RESUME_INPUT,
    Delta,
    EarlierText,
    build_cancellation,
    build_request,
)
from app.inference.triton_stream import read_stream

_QUERY_TIMEOUT_SECONDS = 10.0
_LOAD_TIMEOUT_SECONDS = 600.0  # for a model to load or unload
_CANCEL_TIMEOUT_SECONDS = 5.0  # for a model to end a stream
_CLOSE_GRACE_SECONDS = 2 * _CANCEL_TIMEOUT_SECONDS  # for calls on a connection that is replaced

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Otherwise channels to one address share connections, and a new channel might reuse a dead one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the timeout of one attempt to connect.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Triton's server refuses more frequent pings on a silent stream (its minimum: 300 s).
    ("grpc.keepalive_time_ms", 301_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]


class CannotContinueError(GenerationError):
    """The model cannot continue a text: it has no input `resume_token_ids`."""


@dataclass(slots=True, frozen=True)
class IndexEntry:
    name: str
    version: int | None
    ready: bool
    reason: str
    engine_dead_since: datetime | None = None  # found by probes, not by Triton

    @property
    def rank(self) -> tuple[bool, int]:
        """The best of several entries is a ready one, then that of the highest version."""
        return self.ready, self.version or 0


# Triton's message: https://github.com/triton-inference-server/core, src/infer_request.cc
_UNEXPECTED = re.compile(r"unexpected inference (input|output)")
# The absence of `resume_token_ids` is cached for this time, since the model may be reloaded with it. A
# model that loses the input refuses requests with it.
_INPUTS_CACHE_TTL_SECONDS = 60.0


class TritonClient:
    """A channel to one Triton server; an asynchronous context manager."""

    def __init__(self, address: str) -> None:
        host, port = split_address(address, 8001)
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._has_cancel_input: dict[str, bool] = {}  # by model
        self._has_resume_input: dict[str, tuple[bool, float]] = {}  # by model; time of the query
        self._abandoned: set[asyncio.Task[None]] = set()  # calls whose consumer has left

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
        """Replace the connection; running calls end on the old one.

        Keepalive finds a connection whose other end vanished only after five minutes.
        """
        old = self._channel
        self._connect()
        self._keep(asyncio.create_task(old.close(_CLOSE_GRACE_SECONDS)))

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)

    async def __aexit__(self, *_: object) -> None:
        if self._abandoned:
            await asyncio.wait(self._abandoned, timeout=_CANCEL_TIMEOUT_SECONDS)
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
        """Generate, and call `on_delta` with each response until the last token.

        `wants_ids` requests token ids, if the model returns them. `earlier` requests the rest of that
        text alone. Cancelling this call stops the engine's work. Raises a GenerationError, whose class
        decides whether the attempt counts.
        """
        for _ in range(2):
            returns_ids = wants_ids and await self._takes_resume(model, is_needed=bool(earlier))
            if earlier is not None and not returns_ids:
                raise CannotContinueError(f"model {model} has no input {RESUME_INPUT}")
            request = build_request(
                model, prompt, parameters, uuid4().hex, returns_ids=returns_ids, earlier=earlier
            )
            try:
                return await self._stream(request, on_delta, traceparent)
            except GenerationError as error:
                if not returns_ids or not _UNEXPECTED.search(str(error)):
                    raise
                # The model was reloaded with other inputs than the cached ones.
                self._has_resume_input.pop(model, None)
        raise NotTakenError(f"the inputs of model {model} change")

    async def _stream(
        self,
        request: pb.ModelInferRequest,
        on_delta: Callable[[Delta], None],
        traceparent: str | None,
    ) -> None:
        # For a Triton that traces (--trace-config mode=opentelemetry).
        metadata = None if traceparent is None else (("traceparent", traceparent),)
        call = self._infer(request, metadata=metadata)
        ended = asyncio.get_running_loop().create_future()
        # A task of its own: gRPC cancels a call at once when the task that reads it is cancelled.
        reading = asyncio.create_task(read_stream(call, on_delta, ended))
        is_over = False  # the model has ended the request: it needs no cancellation
        try:
            await ended
            is_over = True
        except GenerationError:
            is_over = True
            raise
        finally:
            if not ended.cancelled():
                ended.exception()  # retrieved, also if this task was cancelled in the same step
            if not reading.done():
                self._abandon(call, reading, None if is_over else request)

    async def generate(
        self, model: str, prompt: str, parameters: dict[str, Any]
    ) -> AsyncGenerator[Delta, None]:
        """`run` as an iterator. Closing or cancelling it stops the engine's work."""
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

    def _abandon(
        self, call: Any, reading: "asyncio.Task[None]", request: pb.ModelInferRequest | None
    ) -> None:
        """Let a call end by itself; a request that still runs is cancelled in its model."""
        self._keep(reading)
        deadline = asyncio.get_running_loop().call_later(_CANCEL_TIMEOUT_SECONDS, call.cancel)
        reading.add_done_callback(lambda _: deadline.cancel())
        if request is not None:
            self._keep(asyncio.create_task(self._cancel_request(call, request)))

    async def _cancel_request(self, call: Any, request: pb.ModelInferRequest) -> None:
        """End a request in the model, which ends its call.

        Cancelling a call that Triton 2.51 is answering crashes the server about once in a thousand
        times, and otherwise blocks the unloading of the model. If the model has no input for
        cancellations (NVIDIA's backend, in newer servers without that fault), cancel the call at once.
        """
        with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError):
            async with asyncio.timeout(_CANCEL_TIMEOUT_SECONDS):
                if await self._takes_cancellation(request.model_name):
                    message = build_cancellation(request.model_name, request.id)
                    async for _ in self._stub.ModelStreamInfer(iter([message])):
                        pass
                    return
        call.cancel()

    async def _takes_cancellation(self, model: str) -> bool:
        if model not in self._has_cancel_input:
            self._has_cancel_input[model] = CANCEL_INPUT in await self._inputs(model)
        return self._has_cancel_input[model]

    async def _takes_resume(self, model: str, *, is_needed: bool) -> bool:
        """Query if a model returns token ids and accepts them again.

        If the server does not answer: raises NotTakenError if the result `is_needed`, else False.
        """
        now = asyncio.get_running_loop().time()
        takes, queried_at = self._has_resume_input.get(model, (False, -math.inf))
        if takes or now - queried_at < _INPUTS_CACHE_TTL_SECONDS:
            return takes
        try:
            takes = RESUME_INPUT in await self._inputs(model)
        except grpc.aio.AioRpcError as error:
            if is_needed:
                raise NotTakenError(error.details() or error.code().name) from error
            return False
        self._has_resume_input[model] = (takes, now)
        return takes

    async def _inputs(self, model: str) -> set[str]:
        message = pb.ModelMetadataRequest(name=model)
        metadata = await self._stub.ModelMetadata(message, timeout=_QUERY_TIMEOUT_SECONDS)
        return {tensor.name for tensor in metadata.inputs}

    async def index(self) -> list[IndexEntry]:
        """The models of Triton's repositories; of several versions, a ready one, then the highest."""
        answer = await self._call(self._stub.RepositoryIndex, pb.RepositoryIndexRequest())
        entries: dict[str, IndexEntry] = {}
        for model in answer.models:
            entry = IndexEntry(
                name=model.name,
                version=int(model.version) if model.version else None,
                ready=model.state == "READY",
                reason=model.reason,
            )
            known = entries.get(entry.name)
            if known is None or entry.rank > known.rank:
                entries[entry.name] = entry
        return list(entries.values())

    async def config(self, model: str) -> Any:
        answer = await self._call(self._stub.ModelConfig, pb.ModelConfigRequest(name=model))
        return answer.config

    async def request_count(self, model: str) -> int:
        """The model's requests since it was loaded, including refused and failed ones."""
        message = pb.ModelStatisticsRequest(name=model)
        answer = await self._call(self._stub.ModelStatistics, message)
        return sum(
            statistics.inference_count + statistics.inference_stats.fail.count
            for statistics in answer.model_stats
        )

    async def is_live(self) -> bool:
        try:
            answer = await self._call(self._stub.ServerLive, pb.ServerLiveRequest())
        except (TritonUnavailableError, TritonError):
            return False
        return bool(answer.live)

    async def load(self, model: str) -> None:
        message = pb.RepositoryModelLoadRequest(model_name=model)
        await self._call(self._stub.RepositoryModelLoad, message, _LOAD_TIMEOUT_SECONDS)

    async def unload(self, model: str) -> None:
        message = pb.RepositoryModelUnloadRequest(model_name=model)
        await self._call(self._stub.RepositoryModelUnload, message, _LOAD_TIMEOUT_SECONDS)

    async def _call(
        self, method: Any, message: Any, seconds: float = _QUERY_TIMEOUT_SECONDS
    ) -> Any:
        try:
            return await method(message, timeout=seconds)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # gRPC's way to report a closed channel.
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
