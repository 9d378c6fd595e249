"""Output of the scripted model: pure functions of a request, without Triton (see model.py)."""

import ctypes
import hashlib
import json
import os
import re
import signal
import time
from dataclasses import dataclass
from typing import Any

DEFAULT_MAX_TOKENS = 16
MAX_CHUNKS = 100_000
_WORD = re.compile(r"[^ \t\r\n]+")  # other line ends are within a word
WORDS = (  # noqa: SIM905 - one line a word otherwise
    "amber basil cedar délta ember fjørd garnet hazel indigo jasper krill lumen maple naïve onyx "
    "pearl quartz river sable topaz umber vesper willow xenon yarrow zephyr 漢字 Ωmega 🙂 привет "
    "slate thyme"
).split()


class RefusedError(ValueError):
    """The request itself is wrong; the message names what."""


class Token(str):
    """Text of a token whose id a directive sets; the ids of others are made of their texts."""

    token_id: int

    def __new__(cls, text: str, token_id: int) -> "Token":
        token = super().__new__(cls, text)
        token.token_id = token_id
        return token


@dataclass(slots=True)
class Script:
    """Output of one request."""

    chunks: list[str]
    finish_reason: str = "stop"
    delay: float = 0.0  # seconds before each chunk
    first_delay: float = 0.0  # seconds more before the first
    fault: str = ""  # one of "fail_at", "lost_at", "crash_at", "hang_at"
    fault_at: int = -1  # number of chunks before the fault; -1: none
    has_clock: bool = False  # each chunk is the time at which its step was due
    start: int = 0  # chunks that an earlier generation sent

    def due_after(self, due: float) -> float:
        """Time of the chunk that follows one that was due.

        Scripts advance as an engine steps: those of one delay together, at its multiples.
        """
        if not self.delay:
            return due
        step = int(due / self.delay + 1e-6)  # a multiple is one also if it was rounded down
        return (step + 1) * self.delay

    def write_time(self, number: int, due: float) -> None:
        """Replace a chunk by the time at which it was due, if the script has a clock."""
        if self.has_clock and number < len(self.chunks):
            moment = due if self.delay else time.monotonic()
            self.chunks[number] = f"{moment * 1e9:.0f} "

    def error_after(self, sent: int) -> str | None:
        """The error of a fault after so many chunks; None if the fault is the process's."""
        if self.fault == "lost_at":
            return f"UNAVAILABLE: the script lost its engine after {sent} chunks"
        if self.fault == "fail_at":
            return f"INTERNAL: the script failed after {sent} chunks"
        return None

    def end_process(self) -> None:
        """Kill this process, or stop it indefinitely with its interpreter locked."""
        if self.fault == "crash_at":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            ctypes.PyDLL(None).pause()


def digest_images(images: list[bytes]) -> str:
    """A text that stands for images, given as base64, in their order."""
    return hashlib.sha256(b"\0".join(images)).hexdigest()


def write_script(prompt: str, sampling: dict[str, Any]) -> Script:
    """Raises RefusedError for a directive or a sampling parameter that makes no sense."""
    directive = read_directive(prompt)
    if "refuse" in directive:
        raise RefusedError("the script refuses this prompt")
    if whole_number("n", sampling.get("n", 1), least=1) != 1:
        raise RefusedError("n must be 1")
    max_tokens = whole_number("max_tokens", sampling.get("max_tokens"), least=1)
    if "text" in directive:
        words = _WORD.findall(directive["text"])
        length = min(len(words), directive.get("chunks", MAX_CHUNKS))
    else:
        length = directive.get("chunks")
        words = []
    if length is None or sampling.get("ignore_eos"):
        length = max_tokens if max_tokens is not None else DEFAULT_MAX_TOKENS
        finish_reason = "length"
    else:
        finish_reason = "stop" if max_tokens is None or length <= max_tokens else "length"
        length = length if max_tokens is None else min(length, max_tokens)
    if length > MAX_CHUNKS:
        raise RefusedError(f"at most {MAX_CHUNKS} chunks, not {length}")
    words = words[:length]
    names = ("lora_name", "images")
    given = "".join(f"{sampling[name]}\0" for name in names if sampling.get(name))
    words += invent_words(f"{given}{sampling.get('seed')}\0{prompt}", length)[len(words) :]
    chunks = [word if index == 0 else " " + word for index, word in enumerate(words)]
    if "nul" in directive and chunks:
        chunks[0] = "\0" + chunks[0]
    if "token" in directive:
        chunks = [Token("\ufffd", directive["token"])] * length
    script = Script(chunks, finish_reason)
    script.delay = directive.get("delay_ms", 0.0) / 1000
    script.first_delay = directive.get("first_delay_ms", 0.0) / 1000
    script.has_clock = "clock" in directive
    cut_at_stop(script, sampling)
    for fault in ("fail_at", "lost_at", "crash_at", "hang_at"):
        if directive.get(fault, len(script.chunks) + 1) <= len(script.chunks):
            script.fault, script.fault_at = fault, directive[fault]
    return script


def resume_script(script: Script, prompt: str, token_ids: list[int], text: str) -> None:
    """Go on behind the chunks of an earlier generation. Raises RefusedError if they are not the
    script's."""
    known = script.chunks[: len(token_ids)]
    if [to_token_id(chunk) for chunk in known] != token_ids:
        raise RefusedError("resume_token_ids are not the ids of this script")
    # The service stores U+FFFD for NUL.
    if "".join(known).replace("\0", "\ufffd") != text:
        raise RefusedError("resume_token_ids do not fit resume_text")
    script.start = len(token_ids)
    if "once" in read_directive(prompt) or script.start > script.fault_at:
        script.fault, script.fault_at = "", -1


def read_directive(prompt: str) -> dict[str, Any]:
    _, _, rest = prompt.partition("{{")
    found, closing, _ = rest.partition("}}")
    if not closing:
        return {}
    words, has_text, text = found.partition("text=")
    directive: dict[str, Any] = {"text": text} if has_text else {}
    for word in words.split():
        key, _, value = word.partition("=")
        if key in ("refuse", "nul", "clock", "once") and not value:
            directive[key] = True
        elif key in ("delay_ms", "first_delay_ms"):
            directive[key] = float_at_least_zero(key, value)
        elif key in ("chunks", "token", "fail_at", "lost_at", "crash_at", "hang_at"):
            directive[key] = whole_number(key, value, least=0)
        else:
            raise RefusedError(f"the directive has no {word!r}")
    return directive


def whole_number(name: str, value: Any, least: int) -> int | None:
    """None stays None; digits in a string are accepted, as Triton's vLLM backend does."""
    if value is None:
        return None
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        raise RefusedError(f"{name} must be a whole number, not {value!r}") from None
    if number < least:
        raise RefusedError(f"{name} must be at least {least}, not {number}")
    return number


def float_at_least_zero(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise RefusedError(f"{name} must be a number >= 0, not {value!r}")
    return number


def invent_words(key: str, count: int) -> list[str]:
    """A word and 24 bits per chunk from an extendable hash: the first words do not depend on
    how many are asked for."""
    digest = hashlib.shake_128(key.encode("utf-8", "surrogatepass")).digest(4 * count)
    return [
        f"{WORDS[digest[i] % len(WORDS)]}-{digest[i + 1 : i + 4].hex()}"
        for i in range(0, 4 * count, 4)
    ]


def digest_of(chunk: str) -> bytes:
    return hashlib.sha256(chunk.encode("utf-8", "surrogatepass")).digest()


def to_token_id(chunk: str) -> int:
    if isinstance(chunk, Token):
        return chunk.token_id
    return int.from_bytes(digest_of(chunk)[:3], "big")


def write_logprobs(chunk: str, wanted: int) -> dict[int, dict[str, Any]]:
    """A chunk's entry in vLLM's format: the chosen token first, then the `wanted` likeliest."""
    digest = digest_of(chunk)
    chosen = to_token_id(chunk)
    rank = 1 + digest[3] % 2
    # -0.25 and less, so that texts differ in their sum.
    entries = {
        chosen: {"logprob": -(rank + digest[4] / 256) / 4, "rank": rank, "decoded_token": chunk}
    }
    for other in range(1, wanted + 1):
        if other != rank:
            entry = {"logprob": -other / 4, "rank": other, "decoded_token": f" other{other}"}
            entries[chosen + other] = entry
    return entries


def write_prompt_logprobs(prompt: str, wanted: int) -> str:
    """The entries of a prompt's words as JSON; the first one has none, as in vLLM."""
    words = [word if index == 0 else " " + word for index, word in enumerate(prompt.split())]
    entries = [write_logprobs(word, wanted) for word in words[1:]]
    return json.dumps([None, *entries] if words else [])


def cut_at_stop(script: Script, sampling: dict[str, Any]) -> None:
    stops = sampling.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise RefusedError("stop must be a string or a list of strings, none of them empty")
    text = "".join(script.chunks)
    # As in vLLM the stop string that is complete first wins.
    ends = [(text.index(stop) + len(stop), len(stop)) for stop in stops if stop in text]
    if not ends:
        return
    end, length = min(ends)
    if not sampling.get("include_stop_str_in_output"):
        end -= length
    script.finish_reason = "stop"
    kept: list[str] = []
    for chunk in script.chunks:
        kept.append(chunk[:end])
        end -= len(chunk)
        if end <= 0:
            break
    script.chunks = kept


def read_sampling(encoded: bytes) -> dict[str, Any]:
    try:
        sampling = json.loads(encoded)
    except ValueError as error:
        raise RefusedError(f"sampling_parameters is not JSON: {error}") from None
    if not isinstance(sampling, dict):
        raise RefusedError("sampling_parameters must be a JSON object")
    return sampling
