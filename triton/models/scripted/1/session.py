"""Sessions of the scripted model: one response per step for all generations of a client.

The protocol is in docs/sessions.md. Each session has a thread, which makes the chunks that are due
and sends them.
"""

import heapq
import json
import threading
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from script import (
    RefusedError,
    Script,
    resume_script,
    to_token_id,
    write_logprobs,
    write_prompt_logprobs,
    write_script,
)
from session_commands import Opening, Submission, read_commands
from tensors import FINAL, numbers, send_error, strings

POLL_INTERVAL = 0.1  # seconds between two looks whether the call is broken
UNACKNOWLEDGED_INTERVAL = 1.0  # seconds between two responses beyond the window
CHUNKS_PER_STEP = 16  # that a script which is late makes up for
MAX_BYTES = 1 << 20  # of a response's text and log probabilities


class Slot:
    """A generation of a session: what is made of its script, and what is sent."""

    def __init__(self, submission: Submission, script: Script) -> None:
        self.number = submission.slot
        self.is_live = submission.live
        self.returns_ids = submission.token_ids
        self.logprobs = submission.parameters.get("logprobs")
        self.prompt_logprobs = ""  # until they are sent
        if (wanted := submission.parameters.get("prompt_logprobs")) is not None:
            self.prompt_logprobs = write_prompt_logprobs(submission.prompt, wanted)
        self.prompt_tokens: int | None = len(submission.prompt.split())  # until it is sent
        self.script = script
        self.made = self.sent = script.start  # chunks
        self.due = time.monotonic() + script.first_delay + script.delay
        self.end: dict[str, str] | None = None  # its last event
        self.is_fatal = False  # the fault of its script ends or stops this process

    @property
    def is_over(self) -> bool:
        return self.end is not None or self.is_fatal

    @property
    def is_urgent(self) -> bool:
        """True if its output is sent with the step that made it."""
        is_first = self.prompt_tokens is not None
        return self.is_over or (self.made > self.sent and (self.is_live or is_first))

    def advance(self, now: float) -> None:
        """Make the chunks that are due; one of a live script that has no delay."""
        script = self.script
        for _ in range(CHUNKS_PER_STEP if script.delay or not self.is_live else 1):
            if self.due > now:
                return
            if self.made == script.fault_at:
                if (error := script.error_after(self.made)) is None:
                    self.is_fatal = True
                else:
                    self.end = {"error": error}
                return
            script.write_time(self.made, self.due)
            self.made = min(self.made + 1, len(script.chunks))
            if self.made == len(script.chunks) and script.fault_at < 0:
                self.end = {"finish_reason": script.finish_reason}
                return
            self.due = script.due_after(self.due)

    def take(self) -> list[str]:
        """Return the chunks that are not sent, and count them as sent."""
        chunks = self.script.chunks[self.sent : self.made]
        self.sent = self.made
        return chunks

    def take_events(self) -> dict[str, Any]:
        event: dict[str, Any] = {}
        if self.prompt_tokens is not None:
            event["prompt_tokens"], self.prompt_tokens = self.prompt_tokens, None
        return event | (self.end or {})


class Step:
    """The tensors of one response."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.lengths: list[int] = []
        self.counts: list[int] = []
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[str] = []
        self.prompt_logprobs: list[str] = []
        self.events: list[str] = []
        self.size = 0

    def add(self, slot: Slot) -> None:
        chunks = slot.take()
        text = "".join(chunks)
        self.slots.append(slot.number)
        self.lengths.append(len(text))
        self.counts.append(len(chunks))
        self.texts.append(text)
        if slot.returns_ids:
            self.token_ids += map(to_token_id, chunks)
        encoded = ""
        if slot.logprobs is not None and chunks:
            encoded = json.dumps([write_logprobs(chunk, slot.logprobs) for chunk in chunks])
        self.logprobs.append(encoded)
        self.prompt_logprobs.append(slot.prompt_logprobs)
        if event := slot.take_events():
            self.events.append(json.dumps({"slot": slot.number} | event))
        self.size += len(text) + len(encoded) + len(slot.prompt_logprobs)
        slot.prompt_logprobs = ""

    def response(self) -> Any:
        tensors = [
            numbers("session_slots", self.slots, np.int32),
            numbers("session_text_lengths", self.lengths, np.uint32),
            numbers("num_output_tokens", self.counts, np.uint32),
            strings("text_output", ["".join(self.texts)]),
        ]
        if self.token_ids:
            tensors.append(numbers("token_ids", self.token_ids, np.int32))
        if any(self.logprobs):
            tensors.append(strings("logprobs", self.logprobs))
        if any(self.prompt_logprobs):
            tensors.append(strings("prompt_logprobs", self.prompt_logprobs))
        if self.events:
            tensors.append(strings("session_events", self.events))
        return pb_utils.InferenceResponse(output_tensors=tensors)


class Session:
    """One client's generations. Commands arrive in Triton's thread; all else is done in its own."""

    def __init__(self, sender: Any, opening: Opening) -> None:
        self.sender = sender
        self.flush_seconds = opening.flush_seconds
        self.window = opening.window
        self.slots: dict[int, Slot] = {}
        self.last_slot = 0
        self.heap: list[tuple[float, int]] = []  # time of the next step and number of each slot
        self.responses = self.acknowledged = 0
        self.sent_at = 0.0
        self.changed = threading.Condition()
        self.is_closed = False
        self.thread = threading.Thread(target=self.run, name="session")

    # --- commands -------------------------------------------------------------------------------

    def apply(self, name: str, value: Any) -> None:
        """Run a command other than `open`. The caller holds `changed`, and notifies."""
        if name == "submit":
            self.submit(value)
        elif name == "cancel":
            for slot in self.named(value):
                slot.end = {"error": "CANCELLED: the request was cancelled"}
                slot.is_fatal = False
        elif name in ("live", "lazy"):
            for slot in self.named(value):
                slot.is_live = name == "live"
        elif name == "ack":
            self.acknowledged = max(self.acknowledged, value)
        else:
            self.is_closed = True

    def named(self, numbers: Iterable[int]) -> list[Slot]:
        return [self.slots[number] for number in numbers if number in self.slots]

    def submit(self, submission: Submission) -> None:
        self.last_slot = submission.slot
        try:
            script = write_script(submission.prompt, submission.parameters)
            if (resume := submission.resume) is not None:
                resume_script(script, submission.prompt, resume.token_ids, resume.text)
        except RefusedError as error:
            slot = Slot(submission, Script([]))
            slot.end, slot.prompt_tokens = {"error": f"INVALID_ARG: {error}"}, None
        else:
            slot = Slot(submission, script)
        self.slots[slot.number] = slot
        heapq.heappush(self.heap, (slot.due, slot.number))

    # --- its thread -----------------------------------------------------------------------------

    def run(self) -> None:
        flush_at = poll_at = 0.0
        while not self.is_closed:
            with self.changed:
                self.make_chunks(now := time.monotonic())
                is_flush = now >= flush_at
                if is_flush:
                    flush_at = now + self.flush_seconds
                step, fatal = self.take_step(is_flush=is_flush)
                if step is None and now < poll_at:
                    next_due = self.heap[0][0] if self.heap else poll_at
                    self.changed.wait(max(0.0, min(next_due, flush_at, poll_at) - now))
                    continue
            # Outside of the lock: each is a round trip to Triton's process.
            if step is not None:
                self.sender.send(step.response())
                self.responses += 1
                self.sent_at = time.monotonic()
                if fatal is not None:
                    fatal.end_process()
            if now >= poll_at:
                poll_at = now + POLL_INTERVAL
                if self.sender.is_cancelled():
                    self.is_closed = True
        self.sender.send(flags=FINAL)

    def make_chunks(self, now: float) -> None:
        due = []
        while self.heap and self.heap[0][0] <= now:
            due.append(heapq.heappop(self.heap)[1])
        for slot in self.named(due):
            if not slot.is_over:
                slot.advance(now)
            if not slot.is_over:
                heapq.heappush(self.heap, (slot.due, slot.number))

    def take_step(self, *, is_flush: bool) -> tuple[Step | None, Script | None]:
        """The next response, if there is one now, and the script whose fault follows it."""
        is_ahead = self.window is not None and self.responses - self.acknowledged >= self.window
        if is_ahead and time.monotonic() < self.sent_at + UNACKNOWLEDGED_INTERVAL:
            return None, None
        step, fatal = Step(), None
        for slot in list(self.slots.values()):
            if step.size >= MAX_BYTES:
                break
            if slot.is_urgent or (is_flush and slot.made > slot.sent):
                step.add(slot)
                if slot.is_over:
                    del self.slots[slot.number]
                if slot.is_fatal:
                    fatal = slot.script
        return (step if step.slots else None), fatal


def check_commands(commands: list[tuple[str, Any]], last_slot: int | None) -> None:
    """Check the commands of one message; the model runs all of them or none.

    `last_slot`: the highest one of the session so far; None if the session is not open. Raises
    RefusedError.
    """
    if last_slot is None and [name for name, _ in commands[:1]] != ["open"]:
        raise RefusedError("the session is not open")
    for number, (name, value) in enumerate(commands):
        if name == "open":
            if last_slot is not None or number > 0:
                raise RefusedError("the session is open already")
            last_slot = 0
        elif name == "submit":
            if value.slot <= (last_slot or 0):
                raise RefusedError(f"slot {value.slot} was used before")
            last_slot = value.slot


class Sessions:
    """The sessions of the model, by their ids."""

    def __init__(self) -> None:
        self.by_id: dict[str, Session] = {}

    def receive(self, session_id: str, encoded: Iterable[bytes], sender: Any) -> None:
        """Run the commands of one message; `sender` answers it."""
        self.by_id = {key: one for key, one in self.by_id.items() if one.thread.is_alive()}
        session = self.by_id.get(session_id)
        try:
            commands = list(read_commands(encoded))
            check_commands(commands, None if session is None else session.last_slot)
        except RefusedError as error:
            send_error(sender, f"INVALID_ARG: {error}")
            return
        is_opening = session is None
        for name, value in commands:
            if session is None:
                session = Session(sender, value)
                continue
            with session.changed:
                session.apply(name, value)
                session.changed.notify()
        if is_opening:
            assert session is not None
            self.by_id[session_id] = session
            session.thread.start()
        else:
            sender.send(flags=FINAL)

    def close(self) -> None:
        for session in self.by_id.values():
            with session.changed:
                session.is_closed = True
                session.changed.notify()
        for session in self.by_id.values():
            session.thread.join()
