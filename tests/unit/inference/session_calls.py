"""Scripted calls of a session with a model, and responses as its model makes them."""

import asyncio
import functools
import json
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import deserialize_bytes_tensor

from app.inference.triton_messages import Delta, EarlierText
from app.inference.triton_session import EngineSession, LiveSwitch
from tests.virtual_time import run_in_virtual_time

FLUSH_SECONDS = 0.25


def in_virtual_time(
    test: Callable[..., Coroutine[Any, Any, None]],
) -> Callable[..., None]:
    """Run a test with a clock that jumps to the next timer."""

    @functools.wraps(test)
    def run(*arguments: Any, **members: Any) -> None:
        run_in_virtual_time(test(*arguments, **members))

    return run


async def settle() -> None:
    """Let all tasks run until each waits."""
    await asyncio.sleep(0.001)  # of the virtual clock, which moves once all of them wait


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Part:
    """A slot's part of a response."""

    slot: int
    text: str = ""
    tokens: int = 1
    ids: tuple[int, ...] = ()
    logprobs: str = ""
    prompt_logprobs: str = ""
    event: dict[str, Any] = field(default_factory=dict)


def ended(slot: int, text: str = "", reason: str = "stop", **members: Any) -> Part:
    return Part(slot, text, event={"finish_reason": reason}, **members)


def failed(slot: int, error: str, text: str = "", **members: Any) -> Part:
    return Part(slot, text, len(text), event={"error": error}, **members)


def strings(*values: str) -> bytes:
    encoded = [value.encode() for value in values]
    return b"".join(struct.pack("<I", len(value)) + value for value in encoded)


def numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def step_tensors(*parts: Part) -> dict[str, bytes]:
    """The tensors of a response, as docs/sessions.md lists them."""
    tensors = {
        "session_slots": numbers(*(part.slot for part in parts)),
        "session_text_lengths": numbers(*(len(part.text) for part in parts)),
        "text_output": strings("".join(part.text for part in parts)),
        "num_output_tokens": numbers(*(part.tokens for part in parts)),
    }
    if ids := [one for part in parts for one in part.ids]:
        tensors["token_ids"] = numbers(*ids)
    if any(part.logprobs for part in parts):
        tensors["logprobs"] = strings(*(part.logprobs for part in parts))
    if any(part.prompt_logprobs for part in parts):
        tensors["prompt_logprobs"] = strings(*(part.prompt_logprobs for part in parts))
    if events := [{"slot": part.slot} | part.event for part in parts if part.event]:
        tensors["session_events"] = strings(*map(json.dumps, events))
    return tensors


def to_response(tensors: dict[str, bytes], version: str = "1") -> pb.ModelInferResponse:
    response = pb.ModelInferResponse(model_version=version)
    for name, content in tensors.items():
        response.outputs.add(name=name)
        response.raw_output_contents.append(content)
    return response


@dataclass(frozen=True)
class Message:
    """A message as the model reads it."""

    id: str
    model: str
    session: str
    text_input: str
    commands: list[dict[str, Any]]


def read_message(request: pb.ModelInferRequest) -> Message:
    inputs: dict[str, list[bytes]] = {}
    for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True):
        inputs[tensor.name] = list(deserialize_bytes_tensor(content))
        assert (tensor.datatype, list(tensor.shape)) == ("BYTES", [len(inputs[tensor.name])])
    (session,), (text_input,) = inputs.pop("session_v1"), inputs.pop("text_input")
    commands = [json.loads(command) for command in inputs.pop("session_commands")]
    assert inputs == {}
    return Message(request.id, request.model_name, session.decode(), text_input.decode(), commands)


class Call:
    """A call whose model is the test: it keeps the messages, and yields what the test responds."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.has_message = asyncio.Event()
        self.is_done_writing = False
        self.cancelled_at: float | None = None
        self.write_error: Exception | None = None
        self._is_begun = False
        self.side: SideCall | None = None
        self.ends_side = True  # with this call: all messages have their responses then
        self.writer: asyncio.Task[Any] | None = None
        self.carriers: list[Call] = []  # of each message
        self._responses: asyncio.Queue[Any] = asyncio.Queue()

    def begin(self) -> "Call":
        """Begin this call, and then the one of later messages."""
        if self._is_begun:
            self.side = SideCall(self)
            return self.side
        self._is_begun = True
        return self

    # --- the session's side ---------------------------------------------------------------------

    async def write(self, request: pb.ModelInferRequest) -> None:
        await self.may_write.wait()
        if self.write_error is not None:
            raise self.write_error
        assert not self.is_done_writing
        self.keep(request, self)

    def keep(self, request: pb.ModelInferRequest, carrier: "Call") -> None:
        self.writer = asyncio.current_task()
        self.messages.append(read_message(request))
        self.carriers.append(carrier)
        self.has_message.set()

    async def done_writing(self) -> None:
        self.is_done_writing = True

    def cancel(self) -> None:
        """End the call: gRPC reports it to the reader as a cancellation."""
        if self.cancelled_at is None:
            self.cancelled_at = now()
            self._responses.put_nowait(asyncio.CancelledError())

    async def __aiter__(self) -> AsyncIterator[pb.ModelStreamInferResponse]:
        try:
            while (response := await self._responses.get()) is not None:
                if isinstance(response, BaseException):
                    raise response
                yield response
        except asyncio.CancelledError:  # gRPC cancels a call with the task that reads it
            self.cancel()
            raise
        finally:
            if self.side is not None and self.ends_side:
                self.side.end()

    # --- the model's side -----------------------------------------------------------------------

    @property
    def was_cancelled(self) -> bool:
        return self.cancelled_at is not None

    @property
    def commands(self) -> list[dict[str, Any]]:
        """All commands, in order."""
        return [command for message in self.messages for command in message.commands]

    def named(self, name: str) -> list[Any]:
        """The values of all commands of this name."""
        return [command[name] for command in self.commands if name in command]

    def respond(self, *parts: Part) -> None:
        self.send(to_response(step_tensors(*parts)))

    def send(self, response: pb.ModelInferResponse) -> None:
        self._responses.put_nowait(pb.ModelStreamInferResponse(infer_response=response))

    def refuse(self, message: int, error: str) -> None:
        """Respond to a message, the first of which is 0, with an error."""
        response = pb.ModelStreamInferResponse(error_message=error)
        response.infer_response.id = self.messages[message].id
        self.carriers[message]._responses.put_nowait(response)

    def end(self, error: Exception | None = None) -> None:
        self._responses.put_nowait(error)


class SideCall(Call):
    """The call of messages after the first response; `main` keeps them in their order."""

    def __init__(self, main: Call) -> None:
        super().__init__()
        self.main = main
        self.may_write = main.may_write

    async def write(self, request: pb.ModelInferRequest) -> None:
        await self.may_write.wait()
        if self.main.write_error is not None:
            raise self.main.write_error
        assert not self.is_done_writing
        self.main.keep(request, self)


class Run:
    """A generation in a session, and what came of it."""

    def __init__(
        self,
        session: EngineSession,
        prompt: str = "p",
        *,
        is_live: bool = False,
        on_delta: Callable[[Delta], None] | None = None,
        returns_ids: bool = False,
        earlier: EarlierText | None = None,
    ) -> None:
        self.live = LiveSwitch()
        self.live.set(is_live)
        self.deltas: list[Delta] = []
        take = on_delta or self.deltas.append
        running = session.run(
            *(prompt, {"seed": 1}, take, self.live), returns_ids=returns_ids, earlier=earlier
        )
        self.task = asyncio.create_task(running)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    async def error(self) -> tuple[type[BaseException], str] | None:
        """Wait for its end; the class and the text of its error."""
        await asyncio.wait([self.task])
        if self.task.cancelled():
            return asyncio.CancelledError, ""
        found = self.task.exception()
        return None if found is None else (type(found), str(found))


class Engine:
    """A session on a scripted call."""

    def __init__(self) -> None:
        self.call = Call()
        self.session = EngineSession("m", self.call.begin, FLUSH_SECONDS)

    def run(self, prompt: str = "p", **options: Any) -> Run:
        return Run(self.session, prompt, **options)

    async def running(self, count: int, **options: Any) -> list[Run]:
        """As many generations, which the model has: slots 1 to `count`."""
        runs = [self.run(f"p{number}", **options) for number in range(1, count + 1)]
        await settle()
        assert [one["slot"] for one in self.call.named("submit")] == list(range(1, count + 1))
        return runs

    def takes_more(self) -> bool:
        return self.session.is_open

    async def has_closed(self) -> bool:
        """Let the model end the session if it is asked to, and wait for the end of its tasks."""
        await settle()
        if not self.call.named("close"):
            return False
        assert self.call.is_done_writing
        self.call.end()
        await settle()
        return self.session.reading.done()
