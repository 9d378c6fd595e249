"""Sessions of a client: which generations share one, and when sessions begin and end."""

import asyncio
import struct
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from app.inference.session_messages import SESSION_INPUT
from app.inference.triton_client import TritonClient
from app.inference.triton_errors import NotTakenError, RefusedError, StreamLostError
from app.inference.triton_messages import RESUME_INPUT, Delta, EarlierText
from app.inference.triton_session import LiveSwitch
from tests.unit.inference.session_calls import Call, Part, ended, in_virtual_time, numbers, settle

UNEXPECTED = f"unexpected inference input '{SESSION_INPUT}' for model 'm'"


class Stream:
    """A stream of one generation, which has ended."""

    async def __aiter__(self) -> AsyncIterator[pb.ModelStreamInferResponse]:
        message = pb.ModelInferResponse()
        for name, value in (("text_output", b"alone"), ("finish_reason", b"stop")):
            message.outputs.add(name=name)
            message.raw_output_contents.append(struct.pack("<I", len(value)) + value)
        yield pb.ModelStreamInferResponse(infer_response=message)

    def cancel(self) -> None:
        pass


class Client(TritonClient):
    """A client of a server whose models have these inputs, with scripted calls."""

    def __init__(self, *inputs: str) -> None:
        super().__init__("127.0.0.1:1", flush_seconds=0.75)
        self._headers = (("secret", "s"),)
        self.inputs = set(inputs)
        self.queries = 0
        self.calls: list[Call] = []  # of sessions
        self.opened: asyncio.Queue[Call] = asyncio.Queue()
        self.streams: list[pb.ModelInferRequest] = []  # of single generations
        self._script()

    def _script(self) -> None:
        stub: Any = SimpleNamespace(ModelStreamInfer=self._open_call)
        self._stub = stub
        self._infer = self._open_stream

    def _connect(self) -> None:
        super()._connect()
        self._script()

    def _open_call(self, *, metadata: Any) -> Call:
        assert metadata == (("secret", "s"),)
        for call in self.calls:
            if asyncio.current_task() is call.writer:  # the session's second call
                return call.begin()
        self.calls.append(Call())
        self.opened.put_nowait(self.calls[-1])
        return self.calls[-1].begin()

    def _open_stream(self, request: pb.ModelInferRequest, **_: Any) -> Stream:
        self.streams.append(request)
        return Stream()

    async def _query_inputs(self, model: str) -> set[str]:
        self.queries += 1
        return set(self.inputs)

    def start(self, model: str = "m", **options: Any) -> "asyncio.Task[list[str]]":
        """Start a generation; its texts."""

        async def run() -> list[str]:
            deltas: list[Delta] = []
            await self.run(model, "p", {}, deltas.append, **{"live": LiveSwitch()} | options)
            return [delta.text for delta in deltas]

        return asyncio.create_task(run())


@pytest.mark.parametrize(
    ("inputs", "options", "is_shared"),
    [
        ([SESSION_INPUT], {}, True),
        ([], {}, False),
        (["session_v2"], {}, False),
        ([SESSION_INPUT], {"live": None}, False),
        ([SESSION_INPUT], {"traceparent": "00-1-2-01"}, False),
    ],
)
@in_virtual_time
async def test_a_generation_shares_a_session_if_it_can(
    inputs: list[str], options: dict[str, Any], is_shared: bool
) -> None:
    client = Client(*inputs)
    running = client.start(**options)
    await settle()
    assert (len(client.calls), len(client.streams)) == (is_shared, not is_shared)
    if is_shared:
        client.calls[0].respond(ended(1, "shared"))
    assert await running == ["shared" if is_shared else "alone"]


@in_virtual_time
async def test_generations_of_a_model_share_its_session() -> None:
    client = Client(SESSION_INPUT)
    running = [client.start(model) for model in ("m", "n", "m")]
    await settle()
    assert [call.messages[0].model for call in client.calls] == ["m", "n"]
    assert [len(call.named("submit")) for call in client.calls] == [2, 1]
    assert client.calls[0].named("open")[0]["flush_seconds"] == 0.75
    assert len({call.messages[0].session for call in client.calls}) == 2
    client.calls[0].respond(ended(1, "a"), ended(2, "b"))
    client.calls[1].respond(ended(1, "c"))
    assert [await one for one in running] == [["a"], ["c"], ["b"]]


@in_virtual_time
async def test_ids_and_earlier_text_go_to_the_session() -> None:
    client = Client(SESSION_INPUT, RESUME_INPUT)
    live = LiveSwitch()
    live.set(True)
    client.start(live=live, wants_ids=True, earlier=EarlierText("a", numbers(5)))
    client.start()
    await settle()
    first, second = client.calls[0].named("submit")
    assert (first["live"], first["token_ids"]) == (True, True)
    assert first["resume"] == {"token_ids": [5], "text": "a"}
    assert set(second) == {"slot", "prompt", "parameters"}


@in_virtual_time
async def test_a_model_that_was_reloaded_without_sessions_gets_streams() -> None:
    client = Client(SESSION_INPUT)
    running = [client.start(), client.start()]
    await settle()
    client.inputs.clear()
    client.calls[0].refuse(0, UNEXPECTED)
    assert [await one for one in running] == [["alone"], ["alone"]]
    assert (len(client.calls), len(client.streams)) == (1, 2)
    assert await client.start() == ["alone"]


@in_virtual_time
async def test_a_model_whose_inputs_change_all_the_time_has_not_taken_a_generation() -> None:
    client = Client(SESSION_INPUT)
    running = client.start()
    for number in range(2):
        await settle()
        client.calls[number].refuse(0, UNEXPECTED)
    with pytest.raises(NotTakenError, match="the inputs of model m change"):
        await running
    assert (client.queries, client.streams) == (2, [])


@in_virtual_time
async def test_another_refusal_of_a_session_is_final() -> None:
    client = Client(SESSION_INPUT)
    running = client.start()
    await settle()
    client.calls[0].refuse(0, "INVALID_ARG: no")
    with pytest.raises(RefusedError, match="no"):
        await running
    assert (len(client.calls), client.queries) == (1, 1)


@in_virtual_time
async def test_a_session_that_has_ended_is_replaced() -> None:
    client = Client(SESSION_INPUT)
    lost = client.start()
    await settle()
    client.calls[0].end()
    with pytest.raises(StreamLostError):
        await lost
    running = client.start()
    await settle()
    client.calls[1].respond(ended(1, "a"))
    assert await running == ["a"]


@in_virtual_time
async def test_sessions_with_models_that_are_not_ready_are_retired() -> None:
    client = Client(SESSION_INPUT)
    running = [client.start(model) for model in ("m", "n", "o")]
    await settle()
    for call in client.calls[:2]:
        call.respond(ended(1))
    client.retire_sessions(["m", "x"])
    await settle()
    assert [call.named("close") for call in client.calls] == [[], [True], []]
    again = [client.start(model) for model in ("m", "n", "o")]
    await settle()
    # The generation on `o` still runs in its session, which takes no more.
    assert [call.messages[0].model for call in client.calls] == ["m", "n", "o", "n", "o"]
    assert [len(call.named("submit")) for call in client.calls] == [2, 1, 1, 1, 1]
    client.calls[2].respond(ended(1, "c"))
    assert await running[2] == ["c"]
    await settle()
    assert client.calls[2].named("close") == [True]
    assert not any(one.done() for one in again)


async def test_a_new_connection_has_new_sessions() -> None:
    client = Client(SESSION_INPUT)
    async with client:
        first = client.start()
        one = await client.opened.get()
        old = client._channel
        await client.reconnect()
        second = client.start()
        other = await client.opened.get()
        assert client._channel is not old
        other.respond(ended(1, "b"))
        one.respond(Part(1, "a"))
        one.respond(ended(1))
        assert await second == ["b"]
        assert await first == ["a", ""]
        for call in (one, other):
            call.end()


async def test_a_client_that_closes_ends_its_sessions_first() -> None:
    client = Client(SESSION_INPUT)
    await client.__aenter__()
    running = client.start()
    call = await client.opened.get()
    await call.has_message.wait()
    call.has_message.clear()
    call.respond(ended(1, "a"))
    assert await running == ["a"]
    closing = asyncio.create_task(client.__aexit__())
    await call.has_message.wait()
    assert call.named("close") == [True]
    assert client._channel.get_state() is not grpc.ChannelConnectivity.SHUTDOWN
    call.end()
    await closing
    assert client._channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
    assert client._abandoned == set()
