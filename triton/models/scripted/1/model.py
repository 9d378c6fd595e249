"""A scripted stand-in for a language model, behind the vLLM backend's tensors.

The text is a pure function of the prompt, `seed`, `lora_name`, the images and the length: one word per chunk, one chunk
per token, the words unlike those of any other prompt, some of them outside ASCII. A longer
script begins with the shorter one. `max_tokens` (default 16) is the number of chunks, `stop`,
`include_stop_str_in_output`, `ignore_eos`, `logprobs`, `prompt_logprobs` and `seed` mean what they mean to vLLM
(a chunk's id and log probability are made of its text; some are the second likeliest); other
sampling parameters are accepted and change nothing.

One directive anywhere in the prompt changes the script, for tests and demonstrations:

    {{chunks=20 delay_ms=10 fail_at=5}}

    chunks=N          the script ends by itself after N chunks (finish_reason "stop"; "length" when
                      max_tokens cuts it earlier). Ignored under ignore_eos.
    text=WORDS ...    send this, a word per chunk, instead of invented words; takes the rest of the
                      directive. Ends by itself like chunks.
    token=ID          each token has this id, and U+FFFD as its text: a part of a character that no other
                      token completes
    delay_ms=X        wait X milliseconds before the first chunk; the others follow at multiples of X
                      milliseconds, so that scripts with this delay advance in steps, as in an engine
    first_delay_ms=X  wait X milliseconds more before the first one
    fail_at=K         fail with INTERNAL after K chunks
    lost_at=K         fail with UNAVAILABLE after K chunks, as the vLLM backend does when its
                      engine died, without anything being dead
    crash_at=K        kill this process (Triton's stub) after K chunks: kill -9
    hang_at=K         stop this process indefinitely after K chunks, its interpreter locked
    once              the fault happens in no generation that continues an earlier one
    refuse            refuse the request with INVALID_ARG at once
    nul               the first chunk starts with a NUL character
    clock             each chunk is the time at which its step was due, in ns of CLOCK_MONOTONIC, and
                      a space: how long it then takes to a reader on the same machine can be measured

A request with the input `session_v1` belongs to a session (docs/sessions.md), whose scripts send
their chunks together, one response a step.

A request with the input `cancel_request_id` generates nothing itself and cancels the one whose id (of
the ModelInferRequest) it names, also if that one comes later; see the vLLM backend for why that is better
than gRPC's way.

With `return_token_ids` each response has the ids of its chunks (`token_ids`). With
`resume_token_ids` and `resume_text`, ids and text of the chunks that an earlier generation of the
same request sent, the script goes on behind them; ids or a text that are not its own are refused.

Unknown words in a directive, and values that are no number, are refused with INVALID_ARG.
"""

import contextlib
import ctypes
import heapq
import itertools
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import triton_python_backend_utils as pb_utils
from cancellations import Cancellations
from script import (
    RefusedError,
    digest_images,
    read_sampling,
    resume_script,
    to_token_id,
    write_logprobs,
    write_prompt_logprobs,
    write_script,
)
from session import Sessions
from tensors import FINAL, numbers, send_error, strings

SPEAKERS = 4  # threads that send chunks; more bring nothing on 2 cores
# A script without delays gives way to the others after this many chunks.
CHUNKS_PER_STEP = 16
# Asking Triton whether a request was cancelled is a round trip to its process, so all requests
# together ask at most 1 / POLL_SHARE times a second, and one of them every POLL_INTERVAL seconds.
POLL_INTERVAL = 0.05
POLL_SHARE = 0.001
PR_SET_PDEATHSIG = 1  # of prctl(2)


class Generation:
    """One request under way: its script, its progress, and its requested outputs."""

    def __init__(self, request: Any) -> None:
        self.sender = request.get_response_sender()
        self.request_id = request.request_id()
        self.is_cancelled = False
        arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        earlier_ids = arrays.pop("resume_token_ids", None)
        images = arrays.pop("image", None)
        inputs = {name: array.flat[0] for name, array in arrays.items()}
        prompt = inputs["text_input"].decode("utf-8", "replace")
        sampling = read_sampling(inputs.get("sampling_parameters", b"{}"))
        if images is not None:
            sampling["images"] = digest_images(images.flatten().tolist())
        self.script = write_script(prompt, sampling)
        if earlier_ids is not None:
            earlier_text = inputs.get("resume_text", b"").decode("utf-8", "replace")
            resume_script(self.script, prompt, earlier_ids.flatten().tolist(), earlier_text)
        self.stream = bool(inputs.get("stream", False))
        # NVIDIA's default: streams never echo the prompt, whole answers do.
        exclude_input = bool(inputs.get("exclude_input_in_output", self.stream))
        if self.stream and not exclude_input:
            raise RefusedError("exclude_input_in_output cannot be false when streaming")
        self.echo = "" if exclude_input else prompt
        self.wanted = frozenset(name for name, value in inputs.items() if value is np.True_)
        self.input_tokens = len(prompt.split())
        self.logprobs_wanted = sampling.get("logprobs")
        self.prompt_logprobs = "null"
        if (wanted := sampling.get("prompt_logprobs")) is not None:
            self.prompt_logprobs = write_prompt_logprobs(prompt, wanted)
        self.sent = self.script.start  # chunks sent so far
        self.cumulative = 0.0  # their log probabilities, where these are asked for
        self.due = time.monotonic() + self.script.first_delay + self.script.delay
        self.next_poll = time.monotonic() + POLL_INTERVAL

    def response(self, start: int, end: int, finish_reason: str) -> Any:
        """The chunks from start up to end as one response."""
        chunks = self.script.chunks[start:end]
        text = self.echo + "".join(chunks)
        tensors = [strings("text_output", [text])]
        if "return_finish_reason" in self.wanted:
            tensors.append(strings("finish_reason", [finish_reason]))
        if "return_num_input_tokens" in self.wanted:
            tensors.append(numbers("num_input_tokens", [self.input_tokens], np.uint32))
        if "return_num_output_tokens" in self.wanted:
            tensors.append(numbers("num_output_tokens", [end - start], np.uint32))
        if "return_token_ids" in self.wanted and chunks:
            ids = [to_token_id(chunk) for chunk in chunks]
            tensors.append(numbers("token_ids", ids, np.int32))
        if "return_logprobs" in self.wanted:
            tensors.append(strings("logprobs", [self.logprobs(chunks)]))
        if start == self.script.start and "return_prompt_logprobs" in self.wanted:
            tensors.append(strings("prompt_logprobs", [self.prompt_logprobs]))
        if "return_cumulative_logprob" in self.wanted:
            for chunk in chunks:
                (entry,) = write_logprobs(chunk, 0).values()
                self.cumulative += entry["logprob"]
            tensors.append(numbers("cumulative_logprob", [self.cumulative], np.float32))
        return pb_utils.InferenceResponse(output_tensors=tensors)

    def logprobs(self, chunks: list[str]) -> str:
        if self.logprobs_wanted is None:
            return "null"
        return json.dumps([write_logprobs(chunk, self.logprobs_wanted) for chunk in chunks])

    def advance(self) -> bool:
        """Send the next chunk; True when the request is over."""
        script = self.script
        if self.sent == script.fault_at:
            if (error := script.error_after(self.sent)) is None:
                script.end_process()
            else:
                send_error(self.sender, error)
            return True
        last = self.sent >= len(script.chunks) - 1 and script.fault_at < 0
        self.sent += 1
        if self.stream:
            reason = script.finish_reason if last else "None"
            end = min(self.sent, len(script.chunks))
            response = self.response(min(self.sent - 1, end), end, reason)
            self.sender.send(response, flags=FINAL if last else 0)
        elif last:
            response = self.response(script.start, len(script.chunks), script.finish_reason)
            self.sender.send(response, flags=FINAL)
        return last


class ServerDeath:
    """Ends this process with Triton's, which a stub only tries when its server was killed: it may
    wait for the dead server's answer indefinitely, with the interpreter lock held.

    The kernel ends it then, once asked. It takes the end of a thread for the end of the parent, and
    the thread that started us ends once the model is loaded; then we are the child of the server's
    first thread, which ends last. Until then, while nothing waits for the server, we look.
    """

    def __init__(self) -> None:
        self.server = os.getppid()
        self.is_asked = False
        threading.Thread(target=self.look, daemon=True).start()

    def look(self) -> None:
        while os.getppid() == self.server:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    def ask(self) -> None:
        """Call it before each exchange with the server, from a thread that lasts: what was asked
        ends with the thread."""
        if self.is_asked:
            return
        children = Path(f"/proc/{self.server}/task/{self.server}/children")
        with contextlib.suppress(OSError):  # the server has ended, or the kernel does not report it
            if str(os.getpid()) in children.read_text().split():
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                self.is_asked = True
        if os.getppid() != self.server:  # it ended just before
            os.kill(os.getpid(), signal.SIGKILL)


class TritonPythonModel:
    """Entry points of Triton's Python backend.

    execute() only reads the request: all responses wait in a heap, by its time, for a
    few threads. Each send is a round trip to Triton's process without the interpreter lock, so
    these overlap with one another and with the next execute().
    """

    def initialize(self, _args: dict[str, str]) -> None:
        self.heap: list[tuple[float, int, Generation]] = []  # by time of the next step
        self.by_id: WeakValueDictionary[str, Generation] = WeakValueDictionary()
        self.cancellations = Cancellations()
        self.numbers = itertools.count()  # breaks ties of the heap
        self.changed = threading.Condition()
        self.stopping = False
        self.sessions = Sessions()
        self.server_death = ServerDeath()
        self.speakers = [
            threading.Thread(target=self.speak, name=f"speaker-{number}")
            for number in range(SPEAKERS)
        ]
        for speaker in self.speakers:
            speaker.start()

    def execute(self, requests: list[Any]) -> None:
        self.server_death.ask()
        for request in requests:
            target = pb_utils.get_input_tensor_by_name(request, "cancel_request_id")
            if target is not None:
                self.cancel(target.as_numpy().flat[0].decode())
                request.get_response_sender().send(flags=FINAL)
                continue
            session = pb_utils.get_input_tensor_by_name(request, "session_v1")
            if session is not None:
                commands = pb_utils.get_input_tensor_by_name(request, "session_commands")
                encoded = [] if commands is None else list(commands.as_numpy().flat)
                sender = request.get_response_sender()
                self.sessions.receive(session.as_numpy().flat[0].decode(), encoded, sender)
                continue
            try:
                generation = Generation(request)
                generation.is_cancelled = self.cancellations.take(generation.request_id)
                self.by_id[generation.request_id] = generation
                self.schedule(generation)
            except RefusedError as error:
                sender = request.get_response_sender()
                send_error(sender, f"INVALID_ARG: {error}")

    def cancel(self, request_id: str) -> None:
        if (generation := self.by_id.get(request_id)) is not None:
            generation.is_cancelled = True
        else:
            self.cancellations.remember(request_id)

    def schedule(self, generation: Generation) -> None:
        at = min(generation.due, generation.next_poll)
        with self.changed:
            heapq.heappush(self.heap, (at, next(self.numbers), generation))
            self.changed.notify()

    def speak(self) -> None:
        while (generation := self.next_generation()) is not None:
            if self.step(generation):
                self.cancellations.end(generation.request_id)
            else:
                self.schedule(generation)

    def next_generation(self) -> Generation | None:
        """Wait for the next one whose time has come; None when the model is unloaded."""
        with self.changed:
            while not self.stopping:
                wait = self.heap[0][0] - time.monotonic() if self.heap else None
                if wait is not None and wait <= 0:
                    return heapq.heappop(self.heap)[2]
                self.changed.wait(wait)
        return None

    def step(self, generation: Generation) -> bool:
        """Send due responses and check for a cancellation; True when the request is over."""
        now = time.monotonic()
        if generation.next_poll <= now and not generation.is_cancelled:
            if generation.sender.is_cancelled():  # meanwhile, `execute` may have set it
                generation.is_cancelled = True
            generation.next_poll = now + max(POLL_INTERVAL, POLL_SHARE * len(self.heap))
        if generation.is_cancelled:
            send_error(generation.sender, "CANCELLED: the request was cancelled")
            return True
        for _ in range(CHUNKS_PER_STEP):
            if generation.due > now:
                break
            generation.script.write_time(generation.sent, generation.due)
            generation.due = generation.script.due_after(generation.due)
            if generation.advance():
                return True
        return False

    def finalize(self) -> None:
        self.sessions.close()
        with self.changed:
            self.stopping = True
            self.changed.notify_all()
        for speaker in self.speakers:
            speaker.join()
