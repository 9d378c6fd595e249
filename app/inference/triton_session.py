"""A session with a model: many generations on one call, one response per engine step.

The protocol is in docs/sessions.md. Commands of one loop round share a message. From the first response on,
messages have a call of their own: Triton aborts when it refuses a message, of a model that is being unloaded,
on a call that it writes a response of a decoupled model to.
"""

import asyncio
import contextlib
import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import grpc
from tritonclient.grpc import service_pb2 as pb

from app.core.waiting import Signal, is_set_within
from app.inference.session_messages import (
    Command,
    SlotOutput,
    build_message,
    build_submission,
    encode_command,
    read_step,
)
from app.inference.triton_errors import (
    GenerationError,
    ModelDeadError,
    ModelFailedError,
    NotTakenError,
    RefusedError,
    StreamLostError,
    to_model_error,
)
from app.inference.triton_messages import Delta, EarlierText
from app.inference.triton_stream import to_stream_error

_MESSAGE_BYTES = 1 << 20  # of a message's commands, or one command
_WINDOW = 4  # responses that the model may send ahead of what this process has read
_IDLE_SECONDS = 30.0  # until a session without generations is closed: it keeps its model loaded
_LAST_OUTPUT_SECONDS = 0.5  # that a cancelled generation waits for output that the model joined
_CLOSE_SECONDS = 30.0  # for the model to end a session: see `triton_client._CANCEL_TIMEOUT_SECONDS`


class LiveSwitch:
    """Switch of a generation: its output is sent in each step, or joined for a while."""

    def __init__(self) -> None:
        self.is_on = False
        self.on_change: Callable[[bool], None] | None = None

    def set(self, is_on: bool) -> None:
        if is_on != self.is_on:
            self.is_on = is_on
            if self.on_change is not None:
                self.on_change(is_on)


@dataclass(slots=True, eq=False)
class _Slot:
    on_delta: Callable[[Delta], None]
    returns_ids: bool
    message_id: str = ""  # of the message that submitted it
    ended: Signal = field(default_factory=Signal)  # or its consumer has left
    error: Exception | None = None

    def end(self, error: Exception | None = None) -> None:
        if not self.ended.is_set():
            self.error = error
            self.ended.set()


class EngineSession:
    """Generations of this process on a model; `is_open` while it takes further ones."""

    def __init__(self, model: str, begin: Callable[[], Any], flush_seconds: float) -> None:
        """`begin` begins a bidirectional call of ModelStreamInfer.

        `flush_seconds`: for which the model may join output that is not live.
        """
        self.is_open = True
        self.model = model
        self._begin = begin
        self._call = begin()  # of the responses, and of the messages before the first of them
        self._side_call: Any = None  # of the messages after it
        self._refusals: asyncio.Task[None] | None = None
        self._id = uuid4().hex
        self._slots: dict[int, _Slot] = {}
        self._numbers = itertools.count(1)
        self._messages = itertools.count(1)
        # Those to be sent, with the slot that a submission is for.
        opening = encode_command({"open": {"flush_seconds": flush_seconds, "window": _WINDOW}})
        self._commands: list[tuple[bytes, _Slot | None]] = [(opening, None)]
        self._has_commands = asyncio.Event()
        self._is_closing = False
        self._is_deaf = False  # the model was unloaded or replaced: it gets no more commands
        self._is_over = False  # its responses have ended: nothing more is sent
        self._responses = 0
        self._timer: asyncio.TimerHandle | None = None  # to its close, or to the end of its call
        self._writing = asyncio.create_task(self._write(), name=f"session writer {model}")
        self.reading = asyncio.create_task(self._read(), name=f"session {model}")

    async def run(
        self,
        prompt: str,
        parameters: dict[str, Any],
        on_delta: Callable[[Delta], None],
        live: LiveSwitch,
        *,
        returns_ids: bool,
        earlier: EarlierText | None,
    ) -> None:
        """Generate, and call `on_delta` with each output until the last token.

        Cancelling this call stops the engine's work, and waits for output that the model had
        joined. Raises GenerationError.
        """
        number = next(self._numbers)
        slot = _Slot(on_delta, returns_ids)
        self._send(  # first: a submission that cannot be encoded starts nothing
            build_submission(
                *(number, prompt, parameters),
                is_live=live.is_on,
                returns_ids=returns_ids,
                earlier=earlier,
            ),
            slot,
        )
        self._slots[number] = slot
        if self._timer is not None:
            self._timer.cancel()
        live.on_change = lambda is_on: self._send({"live" if is_on else "lazy": [number]})
        try:
            await slot.ended.wait()
        except asyncio.CancelledError:
            self._send({"cancel": [number]})
            await is_set_within(slot.ended, _LAST_OUTPUT_SECONDS)
            raise
        finally:
            slot.ended.set()
            live.on_change = None
            self._close_if_idle()
        if slot.error is not None:
            raise slot.error

    def retire(self) -> None:
        """Take no more generations, and close after the last one."""
        self.is_open = False
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._is_deaf and all(slot.ended.is_set() for slot in self._slots.values()):
            self._call.cancel()
        if self._slots or self._is_closing:
            return
        if self.is_open:
            self._set_timer(_IDLE_SECONDS, self._close)
        else:
            self._close()

    def _close(self) -> None:
        self.is_open, self._is_closing = False, True
        self._send({"close": True})
        self._set_timer(_CLOSE_SECONDS, self._call.cancel)

    def _set_timer(self, seconds: float, action: Callable[[], object]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, action)

    # --- its call -------------------------------------------------------------------------------

    def _send(self, command: Command, slot: _Slot | None = None) -> None:
        self._commands.append((encode_command(command), slot))
        self._has_commands.set()

    def _take_commands(self) -> list[tuple[bytes, _Slot | None]]:
        """Take the commands of the next message."""
        count = size = 0
        for encoded, _ in self._commands:
            size += len(encoded)
            if count and size > _MESSAGE_BYTES:
                break
            count += 1
        taken, self._commands = self._commands[:count], self._commands[count:]
        if not self._commands:
            self._has_commands.clear()
        return taken

    async def _write(self) -> None:
        call = self._call
        # An error ends the reading of the call, too, which reports it.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while not self._is_closing or self._commands:
                await self._has_commands.wait()
                if self._is_over:
                    break
                if self._responses and self._side_call is None:
                    call = self._side_call = self._begin()
                    self._refusals = asyncio.create_task(self._read_refusals(call))
                taken = self._take_commands()
                message_id = f"{self._id}-{next(self._messages)}"
                for _, slot in taken:
                    if slot is not None:
                        slot.message_id = message_id
                commands = [encoded for encoded, _ in taken]
                await call.write(build_message(self.model, self._id, message_id, commands))
            await call.done_writing()
            await self._call.done_writing()

    async def _read_refusals(self, call: Any) -> None:
        """Read the errors of messages: they have no other responses."""
        error: GenerationError = StreamLostError("the model ended the session")
        with contextlib.suppress(asyncio.CancelledError):
            try:
                async for response in call:
                    if response.error_message:
                        self._on_response(response)
            except grpc.aio.AioRpcError as broken:
                error = to_stream_error(broken)
            if not self._is_closing:
                self._fail(error)

    async def _read(self) -> None:
        error: GenerationError = StreamLostError("the model ended the session")
        try:
            async for response in self._call:
                self._on_response(response)
        except grpc.aio.AioRpcError as broken:
            error = to_stream_error(broken)
        except asyncio.CancelledError:
            error = StreamLostError("the connection was closed")
            raise
        finally:
            self.is_open, self._is_closing = False, True
            if self._timer is not None:
                self._timer.cancel()
            self._end_all(error)
            await self._end_writing()

    async def _end_writing(self) -> None:
        """Let the call of the messages end by itself: see `TritonClient._cancel_request`."""
        self._is_over = True
        self._has_commands.set()
        tasks = [task for task in (self._writing, self._refusals) if task is not None]
        try:
            await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
        finally:
            for task in tasks:  # gRPC cancels a call with the task that reads it
                task.cancel()

    def _end_all(self, error: Exception) -> None:
        slots, self._slots = self._slots, {}
        for slot in slots.values():
            slot.end(error)

    def _on_response(self, response: Any) -> None:
        if response.error_message:
            self._on_error(response.infer_response.id, to_model_error(response.error_message))
        else:
            self._on_step(response.infer_response)
        self._close_if_idle()

    def _on_step(self, response: pb.ModelInferResponse) -> None:
        self._responses += 1
        try:
            for output in read_step(response, self._returns_ids):
                self._on_output(output)
        except (ValueError, KeyError, TypeError, struct.error) as error:
            self._fail(ModelFailedError(f"The model's response cannot be read: {error}."))
            return
        if self._responses % (_WINDOW // 2) == 0:
            # A round later: the loop writes for some 0.5 ms, and the ends of generations go first.
            asyncio.get_running_loop().call_soon(self._acknowledge)

    def _acknowledge(self) -> None:
        if not self._is_closing:
            self._send({"ack": self._responses})

    def _returns_ids(self, number: int) -> bool:
        return self._slots[number].returns_ids

    def _on_output(self, output: SlotOutput) -> None:
        number, delta, error = output
        slot = self._slots[number]
        if error is not None or delta.finish_reason is not None:
            del self._slots[number]
        if slot.ended.is_set():
            return
        try:
            if error is None or delta.text or delta.completion_tokens:
                slot.on_delta(delta)
        except Exception as failure:  # noqa: BLE001 - a bug must reach its owner, and no other
            slot.end(failure)
            self._send({"cancel": [number]})
        else:
            if error is not None:
                slot.end(to_model_error(error))
            elif delta.finish_reason is not None:
                slot.end()

    def _on_error(self, message_id: str, error: GenerationError) -> None:
        """Handle the refusal of a message: its generations do not run, those of earlier ones do."""
        if message_id == f"{self._id}-1":
            self._fail(error)
            return
        self.is_open, self._is_deaf = False, True
        if isinstance(error, RefusedError):  # the session is not known to a model that was reloaded
            error = NotTakenError(str(error))
        refused = [key for key, slot in self._slots.items() if slot.message_id == message_id]
        for number in refused:
            self._slots.pop(number).end(error)
        if isinstance(error, ModelDeadError):
            self._fail(StreamLostError(str(error)))

    def _fail(self, error: Exception) -> None:
        self.is_open, self._is_closing = False, True
        self._end_all(error)
        self._call.cancel()
