"""The polite team: small requests of all dialects, each timed and compared with its text alone."""

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.storm.raw_http import NoAnswerError, ask
from tests.security.hostile.attacker import MODEL

MAX_TOKENS = 8
_PROMPTS = 5  # different ones of each kind
_PAUSE_SECONDS = 0.1
_ADDRESS = "127.0.0.2"  # its own, as a client's is


@dataclass
class Times:
    """Seconds of requests: until a result is accepted, and until a client has all that it asked for."""

    submits: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)

    def worst_ratio(self, alone: "Times") -> float:
        """The 99th percentiles, of those alone; the larger one."""
        pairs = (self.submits, alone.submits), (self.whole, alone.whole)
        return max(
            percentile(mine, 99) / percentile(other, 99) if mine and other else float("inf")
            for mine, other in pairs
        )

    def __str__(self) -> str:
        if not self.submits:
            return "no request"
        shown = (
            f"{name} p50 {percentile(seconds, 50) * 1000:.0f} ms, p99 {percentile(seconds, 99) * 1000:.0f} ms"
            for name, seconds in (("accepted:", self.submits), ("whole:", self.whole))
        )
        return f"{len(self.whole)} requests; {'; '.join(shown)}"


def percentile(seconds: list[float], percent: int) -> float:
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


@dataclass
class Polite:
    """Requests, their times by phase, and all that went wrong."""

    ports: Sequence[int]  # of the APIs: requests go to one after the other
    token: str
    secret: str
    foreign: bytes  # a text that only the hostile team's rows have
    times: Times = field(default_factory=Times)  # of this phase
    texts: dict[tuple[str, int], str] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    is_over: bool = False
    calls: int = 0

    async def send(self, clients: int) -> None:
        """Have so many clients send one request after another until `is_over`."""
        numbers = itertools.count()
        await asyncio.gather(*(self._be_one(numbers) for _ in range(clients)))

    async def _be_one(self, numbers: "itertools.count[int]") -> None:
        loop = asyncio.get_running_loop()
        while not self.is_over:
            number = next(numbers)
            kind, exchange = list(KINDS.items())[number % len(KINDS)]
            prompt = number // len(KINDS) % _PROMPTS
            begun = loop.time()
            try:
                text = await exchange(
                    self, f"polite {self.secret} {prompt} {{{{chunks=6 delay_ms=5}}}}"
                )
            except (OSError, NoAnswerError, AssertionError, LookupError, ValueError) as error:
                self.faults.append(f"{kind}: {type(error).__name__}: {error}"[:500])
            else:
                self.times.whole.append(loop.time() - begun)
                if (known := self.texts.setdefault((kind, prompt), text)) != text:
                    self.faults.append(f"{kind}: {text[:200]!r}, and {known[:200]!r} before")
            await asyncio.sleep(_PAUSE_SECONDS)

    async def call(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        sent = {"Authorization": f"Bearer {self.token}"} | dict(headers or {})
        self.calls += 1
        port = self.ports[self.calls % len(self.ports)]
        async with ask(port, method, path, body, sent, source=_ADDRESS) as reply:
            content = await reply.read()
            assert reply.status < 300, (path, reply.status, content[:300])
        assert self.foreign not in content, f"{path}: text of the other team"
        return content

    async def ask(self, path: str, body: object, **headers: str) -> Any:
        return json.loads(await self.call("POST", path, body, headers))

    async def submit(self, prompt: str) -> str:
        """Have a result accepted; its id."""
        began = time.monotonic()
        accepted = await self.ask("/results/", _native(prompt))
        self.times.submits.append(time.monotonic() - began)
        self.ids.append(accepted["id"])
        return str(accepted["id"])


async def native(polite: Polite, prompt: str) -> str:
    accepted = await polite.submit(prompt)
    result = json.loads(await polite.call("GET", f"/results/{accepted}?wait=50"))
    assert result["state"] == "completed", result
    return str(result["result"])


async def streamed(polite: Polite, prompt: str) -> str:
    accepted = await polite.submit(prompt)
    events = (await polite.call("GET", f"/results/{accepted}/stream")).decode()
    assert events, "an empty stream"
    result = json.loads(events.strip().splitlines()[-1].removeprefix("data:"))
    assert result["state"] == "completed", events
    return str(result["result"])


async def listed(polite: Polite, _: str) -> str:
    page = json.loads(await polite.call("GET", "/results/?limit=20&prompts=true&full=true"))
    assert all(polite.secret in one["prompt_start"] for one in page), page
    return ""


async def chat(polite: Polite, prompt: str) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}]}
    answer = await polite.ask("/v1/chat/completions", body | {"max_tokens": MAX_TOKENS})
    return str(answer["choices"][0]["message"]["content"])


async def completion(polite: Polite, prompt: str) -> str:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": MAX_TOKENS}
    return str((await polite.ask("/v1/completions", body))["choices"][0]["text"])


async def generate(polite: Polite, prompt: str) -> str:
    body = {"inputs": prompt, "model": MODEL, "parameters": {"max_new_tokens": MAX_TOKENS}}
    return str((await polite.ask("/generate", body))["generated_text"])


async def response(polite: Polite, prompt: str) -> str:
    body = {"model": MODEL, "input": prompt, "max_output_tokens": MAX_TOKENS}
    answer = await polite.ask("/v1/responses", body)
    return str(answer["output"][-1]["content"][0]["text"])


def _native(prompt: str) -> dict[str, Any]:
    return {"model": MODEL, "content": prompt, "parameters": {"max_tokens": MAX_TOKENS}}


KINDS: dict[str, Callable[[Polite, str], Awaitable[str]]] = {
    "native": native,
    "native, streamed": streamed,
    "list": listed,
    "OpenAI chat": chat,
    "OpenAI completions": completion,
    "OpenAI responses": response,
    "TGI generate": generate,
}
