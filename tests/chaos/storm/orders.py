"""The clients' orders, drawn from a seed, and their log of responses."""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.images import png_uri

SCRIPTED = "scripted"
SCORED = "scored"  # the scripted model too, on the servers that return log probabilities of prompts
POOLING, RANKING = "pooling", "ranking"  # tests/pooling_models.py
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
    "Anthropic messages": 5,
    "Anthropic messages, streamed": 5,
    "Anthropic messages, images": 3,
    "OpenAI chat, images": 3,
    "OpenAI completions, scored": 3,
    "OpenAI embeddings": 4,
    "native, embedding": 5,
    "native, images": 4,
    "native, scored": 2,
    "rerank": 3,
    "score": 3,
    "equal requests": 5,
    "OpenAI batch": 0.3,
    "job": 2,
    "past its budget": 2,
}
# Shares of the native requests with a key.
_INTENTS = {"plain": 70, "cancel": 15, "deadline": 5, "fail": 5, "refuse": 5}
_WITH_INTENTS = ("native", "native, embedding", "context, then send")
_OWN_INTENTS = {
    "native, images": {"plain": 55, "cancel": 20, "deadline": 10, "fail": 10, "refuse": 5},
    "job": {"plain": 55, "cancel": 30, "fail": 15},
    "equal requests": {"plain": 75, "cancel": 15, "fail": 10},
}
_MODELS = {
    "OpenAI completions, scored": SCORED,
    "OpenAI embeddings": POOLING,
    "native, embedding": POOLING,
    "native, scored": SCORED,
    "rerank": RANKING,
    "score": RANKING,
    # Never vLLM: its model has no vision, and its answers to equal requests differ.
    "Anthropic messages, images": SCRIPTED,
    "OpenAI chat, images": SCRIPTED,
    "native, images": SCRIPTED,
    "equal requests": SCRIPTED,
}
_WITH_IMAGES = ("Anthropic messages, images", "OpenAI chat, images", "native, images")
_KEYLESS = (
    "native, no key",
    "past its budget",
    "OpenAI chat, streamed",
    "TGI generate_stream",
    "Tenstorrent",
)
_COUNTS = {
    "OpenAI completions, n=2": 2,
    "native, a list": 12,
    "OpenAI batch": 150,
    "OpenAI embeddings": 8,
    "rerank": 6,
    "score": 6,
    "equal requests": 3,
    "job": 15,
}
_WORDS = ("amber", "basil", "cedar", "ember", "garnet", "hazel", "indigo", "jasper")
_EQUAL = 100  # orders of which those with equal requests share a text
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
    images: list[str] = field(default_factory=list)  # of each of its prompts, as data URIs
    query: str = ""  # to which its prompts are documents
    ids: list[str] = field(default_factory=list)  # of results, in the order of the prompts
    texts: list[str] = field(default_factory=list)  # that came, by result
    is_whole: bool = False  # the response marked these texts as complete
    numbers: list[list[Any]] = field(default_factory=list)  # vectors, scores, log probabilities
    sources: dict[str, str] = field(default_factory=dict)  # of reused results, as reported
    reused: list[str] = field(default_factory=list)  # ids of requests whose equal one had ended
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
    intent, model = "plain", _MODELS.get(dialect, SCRIPTED)
    may_be_vllm = with_vllm and dialect not in _COUNTS | _MODELS
    if may_be_vllm and chance.random() < _VLLM_SHARE:
        model = VLLM
    elif dialect in _WITH_INTENTS:
        (intent,) = chance.choices(list(_INTENTS), list(_INTENTS.values()))
    elif intents := _OWN_INTENTS.get(dialect):
        (intent,) = chance.choices(list(intents), list(intents.values()))
    count = _COUNTS.get(dialect, 1)
    choices = count if dialect == "OpenAI completions, n=2" else 1
    write = _text if model in (POOLING, RANKING) else _prompt
    as_intended = "slow" if dialect in _WITH_IMAGES and intent == "plain" else intent
    prompts = [write(chance, f"{number}.{item}", as_intended) for item in range(count // choices)]
    if dialect == "equal requests":
        prompts = [_equal_prompt(seed, number // _EQUAL, intent)] * count
    return Order(
        number,
        dialect,
        SPENT if dialect == "past its budget" else chance.choice(TEAMS),
        intent,
        model,
        prompts,
        choices,
        "" if dialect in _KEYLESS else f"order {number}",
        dialect == "native" and chance.random() < _WEBHOOK_SHARE,
        chance.uniform(0, 2),
        [_image(chance) for _ in range(chance.randint(1, 2))] if dialect in _WITH_IMAGES else [],
        " ".join(chance.sample(_WORDS, 5)) if model == RANKING else "",
    )


def _prompt(chance: random.Random, name: str, intent: str) -> str:
    """Unlike any other, so that its script is its own."""
    directive = f"chunks={chance.randint(1, 24)} delay_ms={chance.choice((0, 5, 20, 60))}"
    if intent == "cancel":
        directive = "chunks=40 delay_ms=80"
    elif intent == "slow":  # most failures meet it while it runs
        directive = f"chunks={chance.randint(20, 40)} delay_ms={chance.choice((60, 100))}"
    elif intent == "deadline":
        directive = "chunks=60 delay_ms=100"
    elif intent == "fail":
        directive = "chunks=6 delay_ms=20 fail_at=3"
    elif intent == "refuse":
        directive = "refuse"
    return f"Order {name} {{{{{directive}}}}}"


def _text(chance: random.Random, name: str, intent: str) -> str:
    """A text for a pooling model, unlike any other."""
    directive = f"delay_ms={chance.choice((0, 20, 200, 1000, 2500))}"
    if intent == "cancel":
        directive = "delay_ms=3200"
    elif intent == "deadline":
        directive = "delay_ms=6000"
    elif intent in ("fail", "refuse"):
        directive = intent
    return f"Order {name} {' '.join(chance.sample(_WORDS, 4))} {{{{{directive}}}}}"


def _equal_prompt(seed: str, number: int, intent: str) -> str:
    """A text of several orders: also of cancelled ones. Those that fail have one of their own."""
    chance = random.Random(f"{seed}: equal {number}")  # noqa: S311 - not for secrets
    directive = f"chunks={chance.randint(4, 16)} delay_ms={chance.choice((0, 20, 60))}"
    if intent == "fail":
        directive = "chunks=6 delay_ms=20 fail_at=3"
    return f"Equal {number} {{{{{directive}}}}}"


def _image(chance: random.Random) -> str:
    return png_uri((chance.randrange(256), chance.randrange(256), chance.randrange(256)))
