"""A client with one order: it retries as far as that is allowed, and records the responses."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.chaos.storm.orders import DEADLINE_SECONDS, VLLM, Log, Order
from tests.chaos.storm.raw_http import Reply, ask

_MAX_TOKENS = 200
_VLLM_MAX_TOKENS = 24
AGAIN = (429, 502, 503, 504, 529)  # statuses that invite to try again
WAIT = "10"  # seconds of a long-poll
FIRST_REST, LONGEST_REST = 0.1, 2.0  # seconds between tries


class GivenUpError(Exception):
    """The storm is over, and so was the time after it, and this order had no end."""


@dataclass
class Scene:
    """State that all clients share.

    `ports` are those of the APIs, of which each connection takes one; `tokens` are by team. Orders are
    begun until `is_over`, and tried again until `gives_up`.
    """

    seed: str
    ports: Sequence[int]
    tokens: Mapping[str, str]
    webhook_url: str
    with_vllm: bool = False
    log: Log = field(default_factory=Log)
    is_over: bool = False
    gives_up: bool = False
    under_way: int = 0


class Client:
    """One client with one order."""

    def __init__(self, scene: Scene, order: Order) -> None:
        self.scene = scene
        self.order = order
        self.headers = {"Authorization": f"Bearer {scene.tokens[order.team]}"}
        if order.key:
            self.headers["Idempotency-Key"] = order.key
        self._chance = random.Random(f"{scene.seed}:{order.number}")  # noqa: S311

    @property
    def max_tokens(self) -> int:
        return _VLLM_MAX_TOKENS if self.order.model == VLLM else _MAX_TOKENS

    @property
    def port(self) -> int:
        return self._chance.choice(self.scene.ports)

    def body(self, number: int = 0) -> dict[str, Any]:
        """The request of one prompt, natively: as a message if it has images."""
        order = self.order
        content: dict[str, Any] = {"content": order.prompts[number]}
        if order.images:
            images = [{"url": one} for one in order.images]
            content = {"messages": [content | {"role": "user", "images": images}]}
        return {"model": order.model} | content | self.options()

    def options(self) -> dict[str, Any]:
        """Members of a native request except model and prompt."""
        options: dict[str, Any] = {"parameters": {"max_tokens": self.max_tokens}}
        if self.order.intent == "deadline":
            options["deadline_seconds"] = DEADLINE_SECONDS
        if self.order.wants_webhook:
            options["webhook_url"] = self.scene.webhook_url
        return options

    async def insist(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> tuple[Reply, Any]:
        """Send until there is an answer that is no invitation to try again; it and its JSON."""
        rest = FIRST_REST
        while True:
            try:
                reply, content = await self.once(method, path, body, **headers)
            except OSError:
                reply, content = None, None
            if reply and (reply.status not in AGAIN or _is_final(reply)):
                return reply, content
            if self.scene.gives_up:
                raise GivenUpError(f"{method} {path}: {content}")
            await asyncio.sleep(rest * self._chance.uniform(0.5, 1.5))
            rest = min(LONGEST_REST, rest * 1.5)

    async def once(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> tuple[Reply, Any]:
        """Send once; the answer and its JSON (None without a body). Raises OSError."""
        try:
            async with ask(self.port, method, path, body, self.headers | headers) as reply:
                content = await reply.read()
        except OSError:
            self.count("broken connection")
            raise
        self.count(str(reply.status))
        return reply, orjson.loads(content) if content else None

    def count(self, what: str) -> None:
        self.scene.log.answers[what] += 1

    def learn_ids(self, reply: Reply) -> None:
        """The result id in the header X-Result-Id."""
        if result_ids := reply.headers.get("x-result-id"):
            self.order.ids = result_ids.split(", ")

    async def follow(self, result_id: str) -> dict[str, Any]:
        """Long-poll until the result is terminal."""
        while True:
            reply, result = await self.insist("GET", f"/results/{result_id}?wait={WAIT}")
            assert reply.status == 200, (reply.status, result)
            if result["state"] != "pending":
                self.order.finals[result_id] = result
                return dict(result)
            if self.scene.gives_up:
                raise GivenUpError(f"{result_id} is pending")

    async def awaited(self, path: str, body: object) -> Any:
        """The answer of a synchronous dialect to a request under a key; None if it is an error."""
        reply, answer = await self.insist("POST", path, body)
        self.learn_ids(reply)
        if reply.status != 200:
            self.order.refusal = f"{reply.status} {answer}"
            return None
        return answer


def _is_final(reply: Reply) -> bool:
    return reply.headers.get("x-should-retry") == "false" or "idempotent-replayed" in reply.headers
