"""A plan of faults drawn from a seed (part, time, duration), and its execution."""

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from asyncpg import PostgresError

from tests.chaos.storm.fault_proxy import FaultProxy

# Faults of a process of each kind and of a network, with their duration in seconds.
_PROCESS_FAULTS = ("kill -9", "SIGTERM", "freeze")
_FAULTS = {
    "service": _PROCESS_FAULTS,
    "Triton": ("kill -9", "kill the model's process", "freeze"),
    "vLLM": ("kill -9", "kill the engine"),
    "NVIDIA": ("kill -9", "kill the engine", "freeze"),
    "PostgreSQL": ("kill -9", "restart", "freeze", "fail over"),
    "network": ("cut", "refuse", "delay", "half open"),
}
_LASTING = ("freeze", "refuse", "delay", "half open")
_SHORTEST, _LONGEST = 0.5, 6.0  # LONGEST is twice a worker's lease
# Time of a part between the end of one fault and the begin of the next; an engine has to load.
_REST_SECONDS = 3.0
_VLLM_REST_SECONDS = 60.0
_SLOWEST = 0.3  # seconds by which each block of a slow network comes later


@dataclass(frozen=True)
class Fault:
    """One failure: `at` seconds after the beginning, for so many `seconds` (0: at once over)."""

    at: float
    what: str
    part: str
    seconds: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.at:6.1f} s  {self.what}: {self.part}{lasting}"


class Victim(Protocol):
    """A process, or a server with all its processes, that can be hurt."""

    def send_signal(self, number: signal.Signals) -> None: ...


class Pair(Victim, Protocol):
    """A server with a standby."""

    async def fail_over(self) -> None: ...


class Engine(Victim, Protocol):
    """A server with a model's process."""

    def kill_server(self) -> None: ...
    def kill_stub(self) -> None: ...
    def kill_engine(self) -> None: ...


def plan(seed: str, seconds: float, parts: Mapping[str, str], pause: float) -> list[Fault]:
    """Failures for so many seconds, one every `pause` on average, the same for the same arguments.

    `parts` are names with their kind (the keys of `_FAULTS`). Kinds of failures come in turns, in an
    order that is shuffled each time; no part meets two at once.
    """
    chance = random.Random(f"faults of {seed}")  # noqa: S311 - not for secrets
    there = set(parts.values())
    kinds = [(kind, what) for kind, several in _FAULTS.items() if kind in there for what in several]
    free_at = dict.fromkeys(parts, 0.0)
    faults: list[Fault] = []
    turn: list[tuple[str, str]] = []
    at = pause
    while at < seconds:
        turn = turn or chance.sample(kinds, len(kinds))
        kind, what = turn.pop()
        part = chance.choice([name for name, its in parts.items() if its == kind])
        lasts = chance.uniform(_SHORTEST, _LONGEST) if what in _LASTING else 0.0
        if free_at[part] <= at and at + lasts <= seconds:
            faults.append(Fault(at, what, part, lasts))
            free_at[part] = at + lasts + (_VLLM_REST_SECONDS if kind == "vLLM" else _REST_SECONDS)
        at += chance.uniform(0.5, 1.5) * pause
    return faults


@dataclass
class Saboteur:
    """Has the planned failures happen to these parts."""

    services: Mapping[str, Callable[[], Victim]]
    tritons: dict[str, Engine]
    vllm: dict[str, Engine]
    nvidia: dict[str, Engine]
    postgres: Pair
    proxies: Mapping[str, FaultProxy]
    done: list[Fault] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # what could not be done, and why

    @property
    def parts(self) -> dict[str, str]:
        """Names of what may fail, each with its kind."""
        names = dict.fromkeys(self.services, "service") | dict.fromkeys(self.tritons, "Triton")
        names |= dict.fromkeys(self.vllm, "vLLM") | dict.fromkeys(self.nvidia, "NVIDIA")
        names |= {"PostgreSQL": "PostgreSQL"}
        return names | dict.fromkeys(self.proxies, "network")

    async def carry_out(self, faults: list[Fault], log: Callable[[str], None]) -> None:
        """Return when the last one is over."""
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                # Until the fault's planned time.
                await asyncio.sleep(began + fault.at - asyncio.get_running_loop().time())
                log(str(fault))
                group.create_task(self._do(fault))

    async def _do(self, fault: Fault) -> None:
        try:
            if fault.part in self.proxies:
                await self._disturb(self.proxies[fault.part], fault)
            elif engine := (self.tritons | self.vllm | self.nvidia).get(fault.part):
                await _hurt_engine(engine, fault)
            elif fault.part in self.services:
                await _hurt(self.services[fault.part](), fault)
            elif fault.what == "fail over":
                await self.postgres.fail_over()
            else:
                await _hurt(self.postgres, fault)
        except (AssertionError, OSError, PostgresError) as error:  # it is down already
            self.failed.append(f"{fault}: {type(error).__name__} {error}")
        else:
            self.done.append(fault)

    async def _disturb(self, proxy: FaultProxy, fault: Fault) -> None:
        effects: dict[str, Callable[[], Awaitable[None]]] = {
            "cut": proxy.cut,
            "refuse": lambda: proxy.refuse(fault.seconds),
            "delay": lambda: proxy.delay(fault.seconds, _SLOWEST * fault.seconds / _LONGEST),
            "half open": lambda: proxy.half_open(fault.seconds),
        }
        await effects[fault.what]()


async def _hurt_engine(engine: Engine, fault: Fault) -> None:
    if fault.what == "kill the engine":
        engine.kill_engine()
    elif fault.what == "kill the model's process":
        engine.kill_stub()
    elif fault.what == "kill -9":
        engine.kill_server()
    else:
        await _hurt(engine, fault)


async def _hurt(victim: Victim, fault: Fault) -> None:
    if fault.what == "freeze":
        victim.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.seconds)  # the fault's duration
        finally:
            victim.send_signal(signal.SIGCONT)
    elif fault.what == "restart":  # PostgreSQL's fast shutdown
        victim.send_signal(signal.SIGINT)
    else:
        victim.send_signal(signal.SIGTERM if fault.what == "SIGTERM" else signal.SIGKILL)
