"""A client of engine sessions (docs/sessions.md), written from that page alone."""

import contextlib
import itertools
import json
import struct
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb, service_pb2_grpc

from app.cli.up.triton import EmbeddedTriton
from app.inference.triton_access import grpc_headers
from tests.triton_streams import read_outputs

LAZY: dict[str, Any] = {"flush_seconds": 0.5}
_names = itertools.count(1)


@dataclass
class Generation:
    """All output of one slot so far."""

    text: str = ""
    tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    prompt_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    responses: int = 0

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None


class SessionClient:
    """One open call with one session."""

    def __init__(self, call: Any, model: str, name: str) -> None:
        self.call = call
        self.model = model
        self.name = name
        self.messages = itertools.count(1)
        self.slots: dict[int, Generation] = defaultdict(Generation)
        self.with_ids: set[int] = set()
        self.responses = 0
        self.errors: dict[str, str] = {}  # by the number of the message

    async def send(self, *commands: Any, name: str | None = None) -> str:
        """Send one message of these commands, each an object or bytes; its number."""
        number = str(next(self.messages))
        encoded = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in commands]
        for command in commands:
            submit = command.get("submit") if isinstance(command, dict) else None
            if isinstance(submit, dict) and submit.get("token_ids") is True:
                self.with_ids.add(submit["slot"])
        request = pb.ModelInferRequest(model_name=self.model, id=number)
        session = (self.name if name is None else name).encode()
        inputs = {"text_input": [b""], "session_v1": [session], "session_commands": encoded}
        for tensor, values in inputs.items():
            request.inputs.add(name=tensor, datatype="BYTES", shape=[len(values)])
            content = b"".join(struct.pack("<I", len(value)) + value for value in values)
            request.raw_input_contents.append(content)
        await self.call.write(request)
        return number

    async def read(self) -> bool:
        """Take in one response; False at the end of the call."""
        response = await self.call.read()
        if response is grpc.aio.EOF:
            return False
        if response.error_message:
            self.errors[response.infer_response.id] = response.error_message
            return True
        self.responses += 1
        self._take_in(read_outputs(response.infer_response))
        return True

    def _take_in(self, outputs: dict[str, list[Any]]) -> None:
        numbers = outputs["session_slots"]
        assert len(set(numbers)) == len(numbers)
        (text,), ids = outputs["text_output"], iter(outputs.get("token_ids", ()))
        logprobs = outputs.get("logprobs", [""] * len(numbers))
        columns = (outputs["session_text_lengths"], outputs["num_output_tokens"], logprobs)
        for number, length, tokens, encoded in zip(numbers, *columns, strict=True):
            generation = self.slots[number]
            assert not generation.has_ended, number
            generation.text += text[:length]
            text = text[length:]
            generation.tokens += tokens
            if number in self.with_ids:
                generation.token_ids += itertools.islice(ids, tokens)
            generation.logprobs += json.loads(encoded or "[]")
            generation.responses += 1
        assert (text, list(ids)) == ("", [])
        for encoded in outputs.get("session_events", ()):
            event = json.loads(encoded)
            generation = self.slots[event.pop("slot")]
            for name, value in event.items():
                assert getattr(generation, name) is None, name
                setattr(generation, name, value)

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            assert await self.read(), "the call ended"

    async def until_ended(self, *numbers: int) -> list[Generation]:
        await self.until(lambda: all(self.slots[number].has_ended for number in numbers))
        return [self.slots[number] for number in numbers]

    async def until_refused(self, number: str) -> str:
        await self.until(lambda: number in self.errors)
        return self.errors[number]

    async def close(self) -> None:
        """End the session, then the call."""
        await self.send({"close": True})
        await self.call.done_writing()
        while await self.read():
            pass


@contextlib.asynccontextmanager
async def connect(triton: EmbeddedTriton, model: str = "demo") -> AsyncIterator[SessionClient]:
    """A call without a session. The caller closes an open one."""
    async with grpc.aio.insecure_channel(triton.address("grpc")) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(metadata=grpc_headers(triton.secret))
        yield SessionClient(call, model, f"test-{next(_names)}")


@contextlib.asynccontextmanager
async def open_session(
    triton: EmbeddedTriton, options: dict[str, Any] = LAZY, model: str = "demo"
) -> AsyncIterator[SessionClient]:
    async with connect(triton, model) as session:
        await session.send({"open": options})
        yield session
        await session.close()
