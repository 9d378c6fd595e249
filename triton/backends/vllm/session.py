"""Engine sessions (docs/sessions.md): many generations in one call, one response per engine step.

vLLM puts each output of a generation into its slot, with no task, queue or thread in between. The
slots that have something to send are marked, and one callback of the loop makes a response of them
after the step. While a response is on its way, outputs are joined in their slots.
"""

import asyncio
import json
from collections.abc import Callable, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from engine_requests import EngineRequests
from generation_request import (
    GenerationRequest,
    RefusedError,
    Resumed,
    check_text,
    encode_logprobs,
    encode_positions,
    numbers,
    read_parameters,
    strings,
)
from grammar_watch import reason_of
from response_stream import ResponseStream, Senders
from session_messages import Ack, Cancel, Close, Command, MessageError, Open, Submit, Watch
from session_slots import Output, Slot, take_response
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

# Seconds between two looks at cancellations and the engine.
PULSE = 0.1
# Seconds between two responses beyond the window: commands do not reach a model that is being
# unloaded, acks included.
FULL_WINDOW_SECONDS = 1.0


class Session:
    """One client's generations. All methods run on the engine's loop."""

    def __init__(
        self,
        options: Open,
        stream: ResponseStream,
        requests: EngineRequests,
        senders: Senders,
        forget: Callable[[], object],
    ) -> None:
        self.options = options
        self.stream = stream
        self.requests = requests
        self.senders = senders
        self.forget = forget
        self.loop = requests.host.loop
        self.last_slot = 0
        self.slots: dict[int, Slot] = {}  # generations that have not ended
        self.tasks: dict[int, asyncio.Task[None]] = {}  # of slots that vLLM does not fill itself
        self.engine_ids: dict[int, str] = {}  # of slots that it does
        self.aborts: set[asyncio.Task[None]] = set()
        self.due: dict[int, Slot] = {}  # to be sent as soon as possible
        self.is_scheduled = False  # a look at what is due
        self.sending: asyncio.Future[Any] | None = None
        self.timer: asyncio.TimerHandle | None = None  # of output that is not due
        self.sent = self.acked = 0  # responses
        self.sent_at = 0.0  # the last one
        self.closed = self.loop.create_future()
        self.is_broken = False  # a response could not be sent

    def start(self) -> None:
        self.life = self.loop.create_task(self.serve())

    def check(self, commands: list[Command]) -> None:
        """Raises MessageError when one of them cannot be run."""
        last_slot = self.last_slot
        for command in commands:
            if isinstance(command, Open):
                raise MessageError("already open")
            if isinstance(command, Submit):
                if command.slot <= last_slot:
                    raise MessageError(f"slot {command.slot} does not follow slot {last_slot}")
                last_slot = command.slot

    def run(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Submit():
                    self.submit(command)
                case Cancel(slots):
                    self.cancel(self.known(slots))
                case Watch(slots, live):
                    self.watch(self.known(slots), live)
                case Ack(responses):
                    self.acked = max(self.acked, responses)
                    self.schedule()
                case Close():
                    self.close()

    def known(self, numbers: Iterable[int]) -> list[Slot]:
        return [self.slots[number] for number in numbers if number in self.slots]

    def submit(self, command: Submit) -> None:
        slot = Slot(command.slot, command.live, command.token_ids)
        self.last_slot = slot.number
        if self.closed.done():
            return
        self.slots[slot.number] = slot
        task = self.loop.create_task(self.generate(slot, command))
        self.tasks[slot.number] = task
        task.add_done_callback(lambda _: self.tasks.pop(slot.number))

    async def generate(self, slot: Slot, command: Submit) -> None:
        """Start the generation of a slot, or run it if it continues a lost one."""
        engine_id = self.requests.next_id()
        try:
            request = make_request(command, self.requests.host.default_sampling)
            self.requests.check_lora(request)
            slot.returns_logprobs = request.sampling.logprobs is not None
            prompt, slot.event["prompt_tokens"] = await self.requests.render(request)
            if request.resumed is None:
                collector = await self.requests.add(request, prompt, engine_id)
                self.engine_ids[slot.number] = engine_id
                self.attach(slot, collector)
                return
            async with aclosing(self.requests.generate(request, prompt, engine_id)) as outputs:
                async for output in outputs:
                    self.receive(slot, output)
        except asyncio.CancelledError:
            self.abort([engine_id])  # vLLM may have added it just before
            raise
        except Exception as error:  # noqa: BLE001 - it is this slot's alone
            self.fail(slot, *self.requests.explain(error))

    def attach(self, slot: Slot, collector: RequestOutputCollector) -> None:
        """Take the outputs where vLLM makes them, with those that it has put before."""
        early, collector.output = collector.output, None
        collector.put = partial(self.receive, slot)
        if early is not None:
            collector.put(early)

    def receive(self, slot: Slot, output: RequestOutput | Exception) -> None:
        """Called by vLLM for each output of each generation. An exception from here would end the
        engine."""
        if slot.number not in self.slots:
            return
        try:
            if isinstance(output, Exception):
                raise output
            (part,) = output.outputs
            if output.prompt_logprobs:
                slot.add_prompt(encode_positions(output.prompt_logprobs))
            self.add(slot, part)
        except Exception as error:  # noqa: BLE001 - it is this slot's alone
            self.abort([self.engine_ids[slot.number]] if slot.number in self.engine_ids else [])
            self.fail(slot, *self.requests.explain(error))

    def add(self, slot: Slot, part: CompletionOutput) -> None:
        is_first = not slot.has_output
        has_logprobs = slot.returns_logprobs and part.logprobs is not None
        slot.add(part.text, part.token_ids, encode_logprobs(part) if has_logprobs else "")
        self.requests.metrics.generation_tokens += len(part.token_ids)
        if (reason := reason_of(part)) is not None:
            self.finish(slot, reason)
        elif slot.live or is_first:
            self.mark(slot)
        elif self.timer is None:
            self.timer = self.loop.call_later(self.options.flush_seconds, self.flush)

    def finish(self, slot: Slot, reason: str) -> None:
        if slot.is_cancelled and reason == "abort":
            self.fail(slot, "CANCELLED", "the generation was cancelled")
        else:
            self.end(slot, finish_reason=reason)

    def fail(self, slot: Slot, code: str, message: str) -> None:
        self.end(slot, error=f"{code}: {message}")

    def end(self, slot: Slot, **event: str) -> None:
        if self.slots.pop(slot.number, None) is not None:
            self.engine_ids.pop(slot.number, None)
            slot.event |= event
            self.mark(slot)

    def cancel(self, slots: list[Slot]) -> None:
        """The engine answers an abort with the last output of the generation."""
        for slot in slots:
            slot.is_cancelled = True
            if slot.number not in self.engine_ids:
                self.tasks[slot.number].cancel()
                self.finish(slot, "abort")
        self.abort([self.engine_ids[slot.number] for slot in slots if slot.number in self.slots])

    def abort(self, engine_ids: list[str]) -> None:
        if engine_ids:
            engine = self.requests.host.engine
            task = self.loop.create_task(engine.abort(engine_ids))
            self.aborts.add(task)
            task.add_done_callback(self.aborts.discard)

    def watch(self, slots: list[Slot], live: bool) -> None:
        for slot in slots:
            slot.live = live
            if live and slot.tokens:
                self.mark(slot)

    def mark(self, slot: Slot) -> None:
        self.due[slot.number] = slot
        self.schedule()

    def flush(self) -> None:
        self.timer = None
        self.due |= {number: slot for number, slot in self.slots.items() if slot.tokens}
        self.schedule()

    def schedule(self) -> None:
        if not self.is_scheduled:
            self.is_scheduled = True
            self.loop.call_soon(self.send_due)

    def send_due(self) -> None:
        self.is_scheduled = False
        if not self.due or self.sending is not None or self.is_full() or self.closed.done():
            return
        self.sent += 1
        self.sent_at = self.loop.time()
        self.sending = self.senders.start(self.send, take_response(self.due))
        self.sending.add_done_callback(self.on_sent)

    def is_full(self) -> bool:
        window = self.options.window
        is_full = window is not None and self.sent - self.acked >= window
        return is_full and self.loop.time() < self.sent_at + FULL_WINDOW_SECONDS

    def send(self, outputs: list[Output]) -> None:
        self.stream.send(build_response(outputs))

    def on_sent(self, sending: asyncio.Future[Any]) -> None:
        self.sending = None
        if (error := sending.exception()) is not None:
            self.break_off(error)
        elif self.due:
            self.schedule()

    def break_off(self, error: BaseException) -> None:
        """Close for an error: its client gets that of the opening message."""
        pb_utils.Logger.log_error(f"a session of {self.requests.model_name} broke: {error}")
        self.is_broken = True
        self.close()

    def close(self) -> None:
        if not self.closed.done():
            self.closed.set_result(None)
            self.forget()

    async def serve(self) -> None:
        """Returns after the final response."""
        try:
            while not self.closed.done() and not self.requests.host.is_dead:
                if await self.senders.run(self.stream.is_cancelled):
                    break
                await asyncio.wait([self.closed], timeout=PULSE)
                self.schedule()  # for a window that is full
        except Exception as error:  # noqa: BLE001 - its client must learn of the end
            self.break_off(error)
        finally:
            await self.finish_stream()

    async def finish_stream(self) -> None:
        """End all generations and the opening message. Only the slots of a dead engine have a
        client that still reads."""
        is_left = self.requests.host.is_dead and not self.closed.done()
        self.close()
        if is_left:
            for slot in list(self.slots.values()):
                self.fail(slot, *self.requests.explain(EngineDeadError()))
        self.abort(list(self.engine_ids.values()))
        for task in self.tasks.values():
            task.cancel()
        self.slots.clear()
        if self.timer is not None:
            self.timer.cancel()
        if self.sending is not None:
            await asyncio.wait([self.sending])
        try:
            while is_left and self.due:
                await self.senders.run(self.send, take_response(self.due))
        except Exception as error:  # noqa: BLE001 - the final response must be sent
            self.break_off(error)
        if self.is_broken:
            await self.senders.run(self.stream.fail, "UNAVAILABLE", "the session broke")
        else:
            await self.senders.run(self.stream.send, None, True)


def check_collector() -> None:
    """Raises when this vLLM's collectors cannot be used as Session.attach() uses them."""
    collector = RequestOutputCollector(RequestOutputKind.DELTA, "check")
    collector.put = partial(collector.put)
    if collector.output is not None:
        raise RuntimeError("this version of vLLM has another RequestOutputCollector")


def make_request(command: Submit, defaults: dict[str, Any]) -> GenerationRequest:
    """Raises RefusedError."""
    sampling, lora_name = read_parameters(command.parameters, defaults)
    if sampling.n != 1:
        raise RefusedError(f"n must be 1 in a session, got n={sampling.n}")
    sampling.output_kind = RequestOutputKind.DELTA
    return GenerationRequest(
        prompt=check_text("prompt", command.prompt),
        prompt_ids=command.prompt_token_ids,
        sampling=sampling,
        lora_name=lora_name,
        stream=True,
        echo=False,
        wanted=frozenset(),
        resumed=None if command.resume is None else Resumed(*command.resume),
    )


def build_response(outputs: list[Output]) -> Any:
    tensors = [
        numbers("session_slots", [output.slot for output in outputs], np.int32),
        numbers("session_text_lengths", [len(output.text) for output in outputs], np.uint32),
        strings("text_output", ["".join(output.text for output in outputs)]),
        numbers("num_output_tokens", [output.tokens for output in outputs], np.uint32),
    ]
    if ids := [number for output in outputs for number in output.token_ids]:
        tensors.append(numbers("token_ids", ids, np.int32))
    if any(output.logprobs for output in outputs):
        tensors.append(strings("logprobs", [output.logprobs for output in outputs]))
    if any(prompts := [output.prompt_logprobs for output in outputs]):
        tensors.append(strings("prompt_logprobs", prompts))
    if events := [{"slot": output.slot} | output.event for output in outputs if output.event]:
        tensors.append(strings("session_events", [json.dumps(event) for event in events]))
    return pb_utils.InferenceResponse(output_tensors=tensors)
