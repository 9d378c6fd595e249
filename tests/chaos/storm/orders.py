"""The clients' orders, drawn from a seed, and their log of responses."""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

SCRIPTED = "scripted"
VLLM = "demo"
TEAMS = ("red", "blue")
SPENT = "spent"  # a team whose budget is used up before the storm

# How often each dialect is drawn, of all.
_SHARES = {
    "native": 20,
    "native, Prefer: wait": 8,
    "native, a list": 4,
    "native, streamed": 12,
    "native, no key": 6,
    "context, then send": 8,
    "OpenAI chat": 6,
    "OpenAI chat, streamed": 6,
    "OpenAI completions, n=2": 4,
    "OpenAI responses": 6,
    "TGI generate": 5,
    "TGI generate_stream": 5,
    "Tenstorrent": 4,
    "OpenAI batch": 0.3,
    "job": 2,
    "past its budget": 2,
}
# Shares of the native requests with a key.
_INTENTS = {"plain": 70, "cancel": 15, "deadline": 5, "fail": 5, "refuse": 5}
_WITH_INTENTS = ("native", "context, then send")
_JOB_INTENTS = {"plain": 55, "cancel": 30, "fail": 15}
_KEYLESS = (
    "native, no key",
    "past its budget",
    "OpenAI chat, streamed",
    "TGI generate_stream",
    "Tenstorrent",
)
_COUNTS = {"OpenAI completions, n=2": 2, "native, a list": 12, "OpenAI batch": 150, "job": 15}
_WEBHOOK_SHARE = 0.15
_VLLM_SHARE = 0.08
DEADLINE_SECONDS = 2.0


@dataclass
class Order:
    """One request, and all responses to its client.

    `intent` is its expected end: "plain" ones complete. `prompts` has one prompt for each
    result it asks for, except for choices of one prompt, of which there are `choices`.
    """

    number: int
    dialect: str
    team: str
    intent: str
    model: str
    prompts: list[str]
    choices: int = 1
    key: str = ""  # Idempotency-Key; "": a request that must not be sent twice
    wants_webhook: bool = False
    pause: float = 0.0  # seconds until it is cancelled
    ids: list[str] = field(default_factory=list)  # of results, in the order of the prompts
    texts: list[str] = field(default_factory=list)  # that came, by result
    is_whole: bool = False  # the response marked these texts as complete
    finals: dict[str, dict[str, Any]] = field(default_factory=dict)  # results by id, as read
    faults: list[str] = field(default_factory=list)  # responses that a client must never receive
    is_broken: bool = False  # its connection ended before its answer did
    refusal: str = ""  # the error it received in place of an answer
    job_id: str = ""
    ends: int = 0  # of its job, that were seen
    is_retried: bool = False  # failed rows of its job may have been sent again
    is_deleted: bool = False  # its job

    @property
    def count(self) -> int:
        """The number of results it requests."""
        return len(self.prompts) * self.choices


@dataclass
class Log:
    """The orders of all clients with their responses."""

    orders: list[Order] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)  # statuses, and connections that broke


def draw(seed: str, number: int, *, with_vllm: bool) -> Order:
    """The order of that number: the same for the same arguments."""
    chance = random.Random(f"{seed}:{number}")  # noqa: S311 - not for secrets
    (dialect,) = chance.choices(list(_SHARES), list(_SHARES.values()))
    intent, model = "plain", SCRIPTED
    if with_vllm and dialect not in _COUNTS and chance.random() < _VLLM_SHARE:
        model = VLLM
    elif dialect in _WITH_INTENTS:
        (intent,) = chance.choices(list(_INTENTS), list(_INTENTS.values()))
    elif dialect == "job":
        (intent,) = chance.choices(list(_JOB_INTENTS), list(_JOB_INTENTS.values()))
    count = _COUNTS.get(dialect, 1)
    choices = count if dialect == "OpenAI completions, n=2" else 1
    return Order(
        number,
        dialect,
        SPENT if dialect == "past its budget" else chance.choice(TEAMS),
        intent,
        model,
        [_prompt(chance, f"{number}.{item}", intent) for item in range(count // choices)],
        choices,
        "" if dialect in _KEYLESS else f"order {number}",
        dialect == "native" and chance.random() < _WEBHOOK_SHARE,
        chance.uniform(0, 2),
    )


def _prompt(chance: random.Random, name: str, intent: str) -> str:
    """Unlike any other, so that its script is its own."""
    directive = f"chunks={chance.randint(1, 24)} delay_ms={chance.choice((0, 5, 20, 60))}"
    if intent == "cancel":
        directive = "chunks=40 delay_ms=80"
    elif intent == "deadline":
        directive = "chunks=60 delay_ms=100"
    elif intent == "fail":
        directive = "chunks=6 delay_ms=20 fail_at=3"
    elif intent == "refuse":
        directive = "refuse"
    return f"Order {name} {{{{{directive}}}}}"
