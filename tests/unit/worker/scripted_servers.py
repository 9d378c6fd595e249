"""Triton servers without a network: each request to one is answered by a function of the test."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from app.core.database import Database
from app.core.settings import Settings
from app.inference.model_registry import Model, ModelRegistry
from app.inference.server_pool import Server, ServerPool
from app.inference.server_store import ServerAddress
from app.inference.triton_client import IndexEntry, TritonClient
from app.inference.triton_messages import Delta, EarlierText
from app.inference.triton_session import LiveSwitch
from app.queue.claim import Claim
from app.worker.attempt import Target
from app.worker.backends.triton_backend import Generation, TritonBackend
from tests.unit.worker.test_attempt import claim_of

OnDelta = Callable[[Delta], None]


@dataclass(frozen=True)
class Request:
    prompt: str
    parameters: dict[str, Any]
    wants_ids: bool
    earlier: EarlierText | None
    traceparent: str | None


def delta(text: str = "x", finish_reason: str | None = "stop", **members: Any) -> Delta:
    known: dict[str, Any] = {
        "prompt_tokens": 1, "completion_tokens": 1, "logprobs": None, "model_version": None,
    }  # fmt: skip
    return Delta(text, finish_reason, **known | members)


async def answer_one_token(on_delta: OnDelta) -> None:
    on_delta(delta())


class ScriptedClient(TritonClient):
    """Keeps the requests, and answers them by `answer`."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.requests: list[Request] = []
        self.reconnections = 0
        self.answer: Callable[[OnDelta], Awaitable[None]] = answer_one_token

    async def run(
        self,
        model: str,
        prompt: str,
        parameters: dict[str, Any],
        on_delta: OnDelta,
        traceparent: str | None = None,
        *,
        wants_ids: bool = False,
        earlier: EarlierText | None = None,
        live: LiveSwitch | None = None,
    ) -> None:
        assert model in ("m", "n", "o")
        self.requests.append(Request(prompt, parameters, wants_ids, earlier, traceparent))
        await self.answer(on_delta)

    async def reconnect(self) -> None:
        self.reconnections += 1

    def raise_always(self, error: Exception) -> None:
        async def fail(_: OnDelta) -> None:
            raise error

        self.answer = fail


class Registry:
    """A registry of models that only counts refreshes."""

    def __init__(self) -> None:
        self.refreshes = 0
        self.handlers: list[Callable[[], None]] = []

    def ready(self) -> list[str]:
        return ["m"]

    def all(self) -> list[Model]:
        """The models, without files."""
        return [Model("m", 1, True, "", None)]

    def on_change(self, handler: Callable[[], None]) -> None:
        self.handlers.append(handler)

    async def refresh(self) -> None:
        await asyncio.sleep(0.02)  # a refresh that others may share
        self.refreshes += 1


class Bench:
    """A backend before scripted servers: `a`, `b`, ... at the addresses `a:1`, `b:1`, ..."""

    def __init__(self, *slots: int, silence_seconds: float = 100.0, **options: Any) -> None:
        settings = Settings.model_construct(triton_grpc="", triton_http="", triton_metrics="")
        self.pool = ServerPool(cast(Database, None), settings)
        self.registry = Registry()
        self.clients: list[ScriptedClient] = []
        for name, count in zip("abc", slots, strict=False):
            server = Server(ServerAddress(name, f"{name}:1", slots=count), 1)
            server.client = client = ScriptedClient(f"{name}:1")
            self.clients.append(client)
            self.pool._servers[name] = server
        self.serve("m")
        self.backend = TritonBackend(
            cast(ModelRegistry, self.registry), self.pool, silence_seconds, **options
        )

    @property
    def servers(self) -> list[Server]:
        return self.pool.servers

    def serve(self, *models: str, on: Sequence[Server] | None = None) -> None:
        for server in self.servers if on is None else on:
            server.models = {name: IndexEntry(name, 1, True, "") for name in models}

    def generation(self, claim: Claim | None = None) -> Generation:
        attempt = self.backend.attempt(claim or claim_of(), lambda _: None)
        assert isinstance(attempt, Generation)
        return attempt

    def on(self, server: Server, asked_at: float) -> Generation:
        """An attempt that the server runs, since a time of the loop's clock."""
        attempt = self.generation()
        attempt.server, attempt.target = server, target(server.name)
        attempt.asked_at = asked_at
        return attempt


def target(name: str, model: str = "m") -> Target:
    return f"{name}:1", model
