"""One connection's worth of attacker: its requests, and what no response to it may hold."""

import contextlib
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import orjson

from tests.chaos.storm.raw_http import NoAnswerError, Reply, ask

MODEL = "scripted"
_SHOWN = 300
_SUCCESS = range(200, 300)
_OVERLOADED = HTTPStatus.SERVICE_UNAVAILABLE
_OVERLOADED_BY_MESSAGES = 529  # of Anthropic's API


@dataclass
class Account:
    """Numbers of responses by attack and status, and faults: statuses and texts that must not be.

    `slowest`: seconds of a response, by attack.
    """

    statuses: dict[str, dict[str, int]] = field(default_factory=dict)
    slowest: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def count(self, attack: str, status: str) -> None:
        counts = self.statuses.setdefault(attack, {})
        counts[status] = counts.get(status, 0) + 1

    def time(self, attack: str, seconds: float) -> None:
        self.slowest[attack] = max(seconds, self.slowest.get(attack, 0.0))

    def add(self, other: "Account") -> None:
        for attack, counts in other.statuses.items():
            known = self.statuses.setdefault(attack, {})
            for status, count in counts.items():
                known[status] = known.get(status, 0) + count
            self.time(attack, other.slowest.get(attack, 0.0))
        self.faults += other.faults

    @property
    def requests(self) -> int:
        return sum(sum(counts.values()) for counts in self.statuses.values())


@dataclass(frozen=True)
class Order:
    """The attacks wanted, and the service as a hostile team sees it.

    `foreign_ids` are ids of the polite team, which it may try; `secret` is a text that only that
    team's responses may have. `scale` multiplies the size of requests: 1 is the most that the
    service accepts.
    """

    attacks: Sequence[str]  # names
    seed: str
    attackers: int  # attacks at a time
    scale: float
    streams: int
    ports: Sequence[int]  # of the APIs
    token: str
    webhook_url: str
    secret: str
    foreign_ids: Sequence[str]


class Attacker:
    """Sends one attack's requests, and accounts for each response."""

    def __init__(self, target: Order, account: Account, name: str, chance: random.Random) -> None:
        self.target = target
        self.account = account
        self.name = name
        self.chance = chance
        self.held = contextlib.ExitStack()  # connections, closed when the attack ends
        self.headers = {"Authorization": f"Bearer {target.token}"}

    @property
    def port(self) -> int:
        """An API, as a proxy chooses one."""
        return self.chance.choice(self.target.ports)

    def size(self, most: int) -> int:
        """A size up to the scaled maximum; often the maximum itself."""
        scaled = max(1, int(most * self.target.scale))
        return scaled if self.chance.random() < 0.5 else self.chance.randrange(scaled) + 1

    async def send(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        """Send a request; its JSON, or None if it is refused, broken off or not JSON."""
        began = time.monotonic()
        try:
            async with ask(
                self.port, method, path, body, self.headers | dict(headers or {})
            ) as reply:
                self.check_head(reply, path)
                content = b"" if reply.status == HTTPStatus.NO_CONTENT else await reply.read()
            self.account.time(self.name, time.monotonic() - began)
        except OSError:
            self.count("broken connection")
            return None
        except NoAnswerError as error:
            self.fault(f"{path}: {error}")
            return None
        self.check_content(content, path)
        if reply.status not in _SUCCESS:
            return None
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError:
            return None

    async def post(self, path: str, body: object, **headers: str) -> Any:
        return await self.send("POST", path, body, headers)

    async def get(self, path: str, **headers: str) -> Any:
        return await self.send("GET", path, None, headers)

    def check_head(self, reply: Reply, path: str) -> None:
        self.count(str(reply.status))
        overloaded = _OVERLOADED_BY_MESSAGES if path.startswith("/v1/messages") else _OVERLOADED
        is_overload = reply.status == overloaded and "retry-after" in reply.headers
        if reply.status >= HTTPStatus.INTERNAL_SERVER_ERROR and not is_overload:
            self.fault(f"{path[:_SHOWN]}: {reply.status} {dict(reply.headers)}")

    def check_content(self, content: bytes, path: str) -> None:
        if self.target.secret.encode() in content:
            self.fault(f"{path[:_SHOWN]}: text of the other team")

    def count(self, status: str) -> None:
        self.account.count(self.name, status)

    def fault(self, text: str) -> None:
        self.account.faults.append(f"{self.name}: {text}")
