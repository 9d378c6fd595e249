"""Output of the generations of a session that is to be sent, joined by slot. Imports nothing of
Triton or vLLM."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Limit of a response's text and log probabilities (docs/sessions.md).
MAX_RESPONSE_BYTES = 1 << 20
# UTF-8 has no longer code point: spares the encoding of text only to measure it.
_CODE_POINT_BYTES = 4


class Output(NamedTuple):
    """One slot in a response."""

    slot: int
    text: str
    tokens: int
    token_ids: list[int]
    logprobs: str  # a JSON list, or empty
    event: dict[str, Any]  # without the slot; may be empty
    prompt_logprobs: str = ""  # a JSON list, in one response of the slot


@dataclass
class Slot:
    """One generation, and its output since the last response."""

    number: int
    live: bool
    returns_ids: bool
    returns_logprobs: bool = False
    is_cancelled: bool = False
    has_output: bool = False  # at any time: the first output is sent at once
    texts: list[str] = field(default_factory=list)
    tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)  # JSON lists
    prompt_logprobs: str = ""
    size: int = 0  # bytes of text and log probabilities at most
    event: dict[str, Any] = field(default_factory=dict)

    def add(self, text: str, token_ids: list[int], logprobs: str = "") -> None:
        self.has_output = True
        if text:
            self.texts.append(text)
            self.size += len(text) * _CODE_POINT_BYTES
        self.tokens += len(token_ids)
        if self.returns_ids:
            self.token_ids += token_ids
        if logprobs:
            self.logprobs.append(logprobs)
            self.size += len(logprobs)

    def add_prompt(self, logprobs: str) -> None:
        self.prompt_logprobs = logprobs
        self.size += len(logprobs)

    def take(self) -> Output:
        """Return the pending output; the slot then has none."""
        output = Output(
            slot=self.number,
            text="".join(self.texts),
            tokens=self.tokens,
            token_ids=self.token_ids,
            logprobs=join_lists(self.logprobs),
            prompt_logprobs=self.prompt_logprobs,
            event=self.event,
        )
        self.texts, self.tokens, self.token_ids, self.logprobs = [], 0, [], []
        self.size, self.event, self.prompt_logprobs = 0, {}, ""
        return output


def join_lists(encoded: list[str]) -> str:
    """One JSON list of the members of several."""
    if len(encoded) < 2:
        return "".join(encoded)
    members = (one[1:-1] for one in encoded)
    return f"[{', '.join(one for one in members if one)}]"


def take_response(due: dict[int, Slot]) -> list[Output]:
    """Take the slots of the next response out of `due`: as many as fit, and at least one."""
    outputs, size = [], 0
    for slot in list(due.values()):
        size += slot.size
        if outputs and size > MAX_RESPONSE_BYTES:
            break
        outputs.append(due.pop(slot.number).take())
    return outputs
