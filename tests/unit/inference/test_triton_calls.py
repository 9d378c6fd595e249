"""Errors of calls to Triton, and the reading of its streams and indexes, without a server."""

import asyncio
import struct
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from app.core.errors import NotFoundError, ServiceError, TritonError, TritonUnavailableError
from app.inference.model_inputs import ModelInputs
from app.inference.triton_access import KEY
from app.inference.triton_client import CannotContinueError, IndexEntry, TritonClient
from app.inference.triton_errors import (
    ModelFailedError,
    NotTakenError,
    RefusedError,
    StreamLostError,
)
from app.inference.triton_messages import Delta, EarlierText, build_cancellation, build_request
from app.inference.triton_stream import read_stream

UNAVAILABLE, DEADLINE = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED
NOT_FOUND, INTERNAL = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INTERNAL


def rpc_error(code: grpc.StatusCode, detail: str | None) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), detail)


async def call_error(error: BaseException) -> ServiceError:
    async def method(*_: Any, **__: Any) -> None:
        raise error

    with pytest.raises(ServiceError) as raised:
        await TritonClient("host:1")._call(method, None)
    return raised.value


@pytest.mark.parametrize(
    ("code", "detail", "kind", "text"),
    [
        (UNAVAILABLE, "refused", TritonUnavailableError, "Triton at host:1 does not answer (refused)."),
        (DEADLINE, "late", TritonUnavailableError, "Triton at host:1 does not answer (late)."),
        (UNAVAILABLE, None, TritonUnavailableError, "Triton at host:1 does not answer (UNAVAILABLE)."),
        (NOT_FOUND, "no model", NotFoundError, "no model"),
        (INTERNAL, "broken", TritonError, "broken"), (INTERNAL, None, TritonError, "INTERNAL"),
    ],
)  # fmt: skip
async def test_each_status_of_grpc_is_an_error_of_the_service(
    code: grpc.StatusCode, detail: str | None, kind: type[ServiceError], text: str
) -> None:
    error = await call_error(rpc_error(code, detail))
    assert (type(error), error.detail) == (kind, text)


async def test_a_wrong_secret_is_named() -> None:
    error = await call_error(rpc_error(UNAVAILABLE, f"This protocol is restricted: {KEY}"))
    assert error.detail.endswith("Is its secret right (LLM_TRITON_SECRET)?")


async def test_a_closed_channel_is_a_removed_server() -> None:
    error = await call_error(asyncio.CancelledError())
    assert isinstance(error, TritonUnavailableError)
    assert error.detail == "The server at host:1 was removed."


async def test_a_cancelled_caller_is_cancelled() -> None:
    waits = asyncio.Event()

    async def method(*_: Any, **__: Any) -> None:
        waits.set()
        await asyncio.Event().wait()

    calling = asyncio.create_task(TritonClient("host:1")._call(method, None))
    await waits.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling


class Model(TritonClient):
    """A client whose calls return given messages; `asked` has the names of its calls."""

    def __init__(self, **answers: Any) -> None:
        super().__init__("host:1")
        self.asked: list[str] = []
        stub: Any = type("Stub", (), {})()
        for name, answer in answers.items():
            setattr(stub, name, self._method(name, answer))
        self._stub = stub

    def _method(self, name: str, answer: Any) -> Any:
        async def call(*_: Any, **__: Any) -> Any:
            self.asked.append(name)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return call


def index_of(*models: tuple[str, str, str]) -> pb.RepositoryIndexResponse:
    answer = pb.RepositoryIndexResponse()
    for name, version, state in models:
        answer.models.add(name=name, version=version, state=state, reason="why")
    return answer


async def test_the_index_has_the_best_version_of_each_model() -> None:
    answer = index_of(
        ("m", "1", "READY"), ("m", "2", "READY"), ("m", "3", "UNAVAILABLE"),
        ("n", "2", "UNAVAILABLE"), ("n", "1", "UNAVAILABLE"), ("o", "", ""),
    )  # fmt: skip
    assert await Model(RepositoryIndex=answer).index() == [
        IndexEntry("m", 2, True, "why"),
        IndexEntry("n", 2, False, "why"),
        IndexEntry("o", None, False, "why"),
    ]


async def test_a_server_that_does_not_answer_is_not_live() -> None:
    assert await Model(ServerLive=pb.ServerLiveResponse(live=True)).is_live()
    assert not await Model(ServerLive=pb.ServerLiveResponse(live=False)).is_live()
    for code in (UNAVAILABLE, INTERNAL):
        assert not await Model(ServerLive=rpc_error(code, "x")).is_live()


async def test_refused_requests_count_as_requests() -> None:
    answer = pb.ModelStatisticsResponse()
    for executed, failed in ((5, 2), (10, 1)):
        statistics = answer.model_stats.add(inference_count=executed)
        statistics.inference_stats.fail.count = failed
    assert await Model(ModelStatistics=answer).request_count("m") == 18


def inputs_of(*names: str) -> pb.ModelMetadataResponse:
    answer = pb.ModelMetadataResponse()
    for name in names:
        answer.inputs.add(name=name)
    return answer


class Queries:
    """The inputs of models on a server, or its error; counts the queries."""

    def __init__(self, answer: set[str] | BaseException) -> None:
        self.answer = answer
        self.count = 0
        self.inputs = ModelInputs(self.query)

    async def query(self, _: str) -> set[str]:
        self.count += 1
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


async def test_a_model_has_the_inputs_of_its_metadata() -> None:
    client = Model(ModelMetadata=inputs_of("text_input", "resume_token_ids"))
    assert await client._inputs.has("m", "resume_token_ids", is_needed=True)
    assert not await client._inputs.has("m", "session_v1")
    assert client.asked == ["ModelMetadata"]


async def test_inputs_of_a_model_are_queried_once() -> None:
    for names in (set[str](), {"a", "b"}):
        model = Queries(names)
        for name in ("a", "a", "b"):
            assert await model.inputs.has("m", name) is (name in names)
        assert model.count == 1
        await model.inputs.has("n", "a")
        assert model.count == 2
        model.inputs.forget("m")
        await model.inputs.has("m", "a")
        assert model.count == 3


async def test_the_absence_of_an_input_is_queried_again_after_a_minute() -> None:
    model = Queries({"a"})
    now = asyncio.get_running_loop().time()
    model.inputs._known = {"m": (set(), now - 30), "n": (set(), now - 100)}
    assert not await model.inputs.has("m", "a")
    assert model.count == 0
    assert await model.inputs.has("n", "a")
    model.inputs._known["n"] = ({"a"}, now - 100)
    assert await model.inputs.has("n", "a")
    assert model.count == 1


async def test_a_model_whose_inputs_are_unknown_has_none() -> None:
    model = Queries(rpc_error(UNAVAILABLE, "away"))
    assert await model.inputs.has("m", "a") is False
    with pytest.raises(NotTakenError, match="away"):
        await model.inputs.has("m", "a", is_needed=True)
    model.answer = rpc_error(UNAVAILABLE, None)
    with pytest.raises(NotTakenError, match="UNAVAILABLE"):
        await model.inputs.has("m", "a", is_needed=True)
    assert model.count == 3  # none of them is cached


async def test_a_model_without_the_input_cannot_continue() -> None:
    model = Model(ModelMetadata=inputs_of("text_input"))
    for wants_ids in (False, True):
        with pytest.raises(CannotContinueError):
            await model.run(
                "m", "x", {}, lambda _: None, wants_ids=wants_ids, earlier=EarlierText("a", b"")
            )


# --- streams --------------------------------------------------------------------------------------


class Stream:
    """A stream of these responses, and then this error."""

    def __init__(self, *responses: Any, error: Exception | None = None) -> None:
        self._responses = responses
        self._error = error

    async def __aiter__(self) -> Any:
        for one in self._responses:
            yield one
        if self._error is not None:
            raise self._error


async def read(stream: Stream) -> tuple[list[Delta], BaseException | None]:
    deltas: list[Delta] = []
    ended = asyncio.get_running_loop().create_future()
    await read_stream(stream, deltas.append, ended)
    assert ended.done()
    return deltas, ended.exception()


def piece(
    text: str = "a", finish_reason: str = "", version: str = "1"
) -> pb.ModelStreamInferResponse:
    message = pb.ModelInferResponse(model_version=version)
    for name, value in (("text_output", text), ("finish_reason", finish_reason)):
        message.outputs.add(name=name)
        message.raw_output_contents.append(struct.pack("<I", len(value)) + value.encode())
    return pb.ModelStreamInferResponse(infer_response=message)


async def test_a_stream_ends_at_its_last_token() -> None:
    deltas, error = await read(Stream(piece("a"), piece("b", "stop"), piece("c")))
    assert ([delta.text for delta in deltas], error) == (["a", "b"], None)
    deltas, error = await read(Stream(piece("a")))
    assert ([delta.text for delta in deltas], error) == (["a"], None)


async def test_a_stream_ends_at_its_first_error() -> None:
    refused = pb.ModelStreamInferResponse(error_message="INVALID_ARG: no")
    deltas, error = await read(Stream(piece("a"), refused, piece("b")))
    assert ([delta.text for delta in deltas], type(error)) == (["a"], RefusedError)


async def test_a_response_that_cannot_be_read_is_the_models_error() -> None:
    short = pb.ModelStreamInferResponse(infer_response=pb.ModelInferResponse())
    short.infer_response.outputs.add(name="text_output")
    short.infer_response.raw_output_contents.append(b"\x01")
    for wrong in (piece(version="new"), short):
        deltas, error = await read(Stream(piece("a"), wrong, piece("b")))
        assert [delta.text for delta in deltas] == ["a"]
        assert isinstance(error, ModelFailedError)
        assert "cannot be read" in str(error)


@pytest.mark.parametrize(
    ("detail", "kind", "text"),
    [
        ("failed to connect to all addresses", NotTakenError, "failed to connect to all addresses"),
        ("This protocol is restricted", NotTakenError, "This protocol is restricted"),
        ("Socket closed", StreamLostError, "Socket closed"),
        ("", StreamLostError, "UNAVAILABLE"), (None, StreamLostError, "UNAVAILABLE"),
    ],
)  # fmt: skip
async def test_a_broken_stream_was_taken_unless_the_connection_failed(
    detail: str | None, kind: type[Exception], text: str
) -> None:
    deltas, error = await read(Stream(piece("a"), error=rpc_error(UNAVAILABLE, detail)))
    assert (len(deltas), type(error), str(error)) == (1, kind, text)
    # After the last token, the break changes nothing.
    _, error = await read(Stream(piece("a", "stop"), error=rpc_error(UNAVAILABLE, detail)))
    assert error is None


async def test_a_consumer_that_has_left_gets_nothing_more() -> None:
    deltas: list[Delta] = []
    ended = asyncio.get_running_loop().create_future()
    ended.cancel()
    await read_stream(Stream(piece("a"), error=rpc_error(UNAVAILABLE, "x")), deltas.append, ended)
    assert deltas == []
    assert ended.cancelled()


# --- messages -------------------------------------------------------------------------------------


def names(tensors: Sequence[Any]) -> list[str]:
    return [tensor.name for tensor in tensors]


def test_token_ids_are_requested_and_resumed() -> None:
    plain = build_request("m", "x", {})
    with_ids = build_request("m", "x", {}, "id", returns_ids=True)
    assert names(with_ids.inputs) == [*names(plain.inputs), "return_token_ids"]
    assert names(with_ids.outputs) == [*names(plain.outputs), "token_ids"]
    assert [*with_ids.raw_input_contents] == [*plain.raw_input_contents, b"\x01"]
    assert (with_ids.id, plain.id) == ("id", "")
    ids = struct.pack("<3i", 7, 8, 9)
    resumed = build_request("m", "x", {}, returns_ids=True, earlier=EarlierText("é", ids))
    assert names(resumed.inputs[-2:]) == ["resume_token_ids", "resume_text"]
    assert [tensor.datatype for tensor in resumed.inputs[-2:]] == ["INT32", "BYTES"]
    assert [list(tensor.shape) for tensor in resumed.inputs[-2:]] == [[3], [1]]
    text = struct.pack("<I", 2) + "é".encode()
    assert [*resumed.raw_input_contents[-2:]] == [ids, text]


def test_a_cancellation_names_its_request() -> None:
    request = build_cancellation("m", "id")
    assert (request.model_name, names(request.inputs)) == (
        "m",
        ["text_input", "cancel_request_id"],
    )
    assert [*request.raw_input_contents] == [struct.pack("<I", 0), struct.pack("<I", 2) + b"id"]
