"""Client of one Triton server over gRPC; `triton_messages` builds and reads its messages.

Generations share a session with their model, if it has sessions; otherwise each has a stream of its
own: cancelling the call reaches the engine, and an error belongs to one request.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any
from uuid import uuid4

import grpc
from tritonclient.grpc import service_pb2 as pb, service_pb2_grpc

from app.core.errors import NotFoundError, TritonError, TritonUnavailableError
from app.core.settings.fields import split_address
from app.inference.images import IMAGES
from app.inference.model_inputs import ModelInputs
from app.inference.session_messages import SESSION_INPUT
from app.inference.triton_access import KEY, grpc_headers
from app.inference.triton_errors import GenerationError, NotTakenError, RefusedError
from app.inference.triton_messages import (
    CANCEL_INPUT,
    IMAGE_INPUT,
    POOLING_INPUT,
    PROMPT_IDS_INPUT,
    PROMPT_LOGPROBS_INPUT,
    RESUME_INPUT,
    Delta,
    EarlierText,
    build_cancellation,
    build_pooling_request,
    build_request,
)
from app.inference.triton_session import EngineSession, LiveSwitch
from app.inference.triton_stream import read_stream

_QUERY_TIMEOUT_SECONDS = 10.0
_LOAD_TIMEOUT_SECONDS = 600.0  # for a model to load or unload
_CANCEL_TIMEOUT_SECONDS = 30.0  # for a model to end a stream; a step of it may be long
_EXIT_SECONDS = 5.0  # for all streams to end, before the connection is closed
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

# Parameters that only some backends have, and the input by which their models show it.
# NVIDIA's reads the token ids of a bias as texts, which its engine cannot use.
_NEEDED = {
    IMAGES: (IMAGE_INPUT, "vision"),
    "prompt_logprobs": (PROMPT_LOGPROBS_INPUT, "sampling"),
    "prompt_token_ids": (PROMPT_IDS_INPUT, "sampling"),
    "logit_bias": (CANCEL_INPUT, "sampling"),
    "task": (POOLING_INPUT, "embeddings"),
}


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


class TritonClient:
    """A channel to one Triton server; an asynchronous context manager."""

    def __init__(
        self, address: str, secret: str | None = None, *, flush_seconds: float = 0.5
    ) -> None:
        """`secret`: the server's, if it is restricted (`triton_access`).

        `flush_seconds`: for which a model may join output that is not live.
        """
        host, port = split_address(address, 8001)
        self._headers = grpc_headers(secret)
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._flush_seconds = flush_seconds
        self._inputs = ModelInputs(self._query_inputs)
        self._sessions: dict[str, EngineSession] = {}  # by model
        self._abandoned: set[asyncio.Task[None]] = set()  # calls whose consumer has left

    async def __aenter__(self) -> "TritonClient":
        self._connect()
        return self

    def _connect(self) -> None:
        self._channel = grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        # As a unary request, one message costs less CPU time, and looks the same on the wire as a stream.
        self._infer = self._channel.unary_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )
        self._sessions.clear()

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
        self.retire_sessions()
        if self._abandoned:
            await asyncio.wait(self._abandoned, timeout=_EXIT_SECONDS)
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
        live: LiveSwitch | None = None,
    ) -> None:
        """Generate, and call `on_delta` with each response until the last token.

        `wants_ids` requests token ids, if the model returns them. `earlier` requests the rest of that
        text alone. `live` lets the generation share a session; one that is traced has a stream of its
        own, to which Triton's spans belong. Cancelling this call stops the engine's work. Raises a
        GenerationError, whose class decides whether the attempt counts.
        """
        has = self._inputs.has
        for name, (needed, page) in _NEEDED.items():
            if parameters.get(name) is not None and not await has(model, needed, is_needed=True):
                raise RefusedError(
                    f"{name}: the backend of model {model} does not support it (docs/{page}.md)"
                )
        if "task" in parameters:
            request = build_pooling_request(model, prompt, parameters, uuid4().hex)
            return await self._stream(request, on_delta, traceparent)
        for _ in range(2):
            returns_ids = wants_ids and await has(model, RESUME_INPUT, is_needed=bool(earlier))
            if earlier is not None and not returns_ids:
                raise CannotContinueError(f"model {model} has no input {RESUME_INPUT}")
            is_shared = live is not None and traceparent is None and IMAGES not in parameters
            is_shared = is_shared and await has(model, SESSION_INPUT)
            try:
                if live is not None and is_shared:
                    return await self._session(model).run(
                        prompt, parameters, on_delta, live, returns_ids=returns_ids, earlier=earlier
                    )
                request = build_request(
                    model, prompt, parameters, uuid4().hex, returns_ids=returns_ids, earlier=earlier
                )
                return await self._stream(request, on_delta, traceparent)
            except GenerationError as error:
                if not (returns_ids or is_shared) or not _UNEXPECTED.search(str(error)):
                    raise
                # The model was reloaded with other inputs than the cached ones.
                self._inputs.forget(model)
        raise NotTakenError(f"the inputs of model {model} change")

    def _session(self, model: str) -> EngineSession:
        session = self._sessions.get(model)
        if session is None or not session.is_open:
            begin = partial(self._stub.ModelStreamInfer, metadata=self._headers)
            session = self._sessions[model] = EngineSession(model, begin, self._flush_seconds)
            self._keep(session.reading)
        return session

    def retire_sessions(self, ready: Collection[str] = ()) -> None:
        """Let the sessions with models that are not `ready` end: they keep their models loaded."""
        for model in self._sessions.keys() - set(ready):
            self._sessions.pop(model).retire()

    async def _stream(
        self,
        request: pb.ModelInferRequest,
        on_delta: Callable[[Delta], None],
        traceparent: str | None,
    ) -> None:
        # For a Triton that traces (--trace-config mode=opentelemetry).
        trace = () if traceparent is None else (("traceparent", traceparent),)
        call = self._infer(request, metadata=self._headers + trace)
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
                if await self._inputs.has(request.model_name, CANCEL_INPUT):
                    message = build_cancellation(request.model_name, request.id)
                    messages = iter([message])
                    async for _ in self._stub.ModelStreamInfer(messages, metadata=self._headers):
                        pass
                    return
        call.cancel()

    async def _query_inputs(self, model: str) -> set[str]:
        message = pb.ModelMetadataRequest(name=model)
        metadata = await self._stub.ModelMetadata(
            message, timeout=_QUERY_TIMEOUT_SECONDS, metadata=self._headers
        )
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
            return await method(message, timeout=seconds, metadata=self._headers)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # gRPC's way to report a closed channel.
            raise TritonUnavailableError(f"The server at {self.address} was removed.") from error
        except grpc.aio.AioRpcError as error:
            detail = error.details() or error.code().name
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                advice = " Is its secret right (LLM_TRITON_SECRET)?" if KEY in detail else ""
                raise TritonUnavailableError(
                    f"Triton at {self.address} does not answer ({detail}).{advice}",
                    headers={"Retry-After": "5"},
                ) from error
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise NotFoundError(detail) from error
            raise TritonError(detail) from error
