"""What a storm was asked for, and what came of it."""

from dataclasses import dataclass, field

from tests.chaos.storm.client import Scene
from tests.chaos.storm.faults import Fault
from tests.chaos.storm.invariants import Account


@dataclass(frozen=True)
class Options:
    """How long, how many scene, and what decides all that is left to chance."""

    seed: str
    seconds: float = 600.0
    crowd: int = 48
    pause: float = 4.0  # seconds between two failures, on average
    with_vllm: bool = False  # a third server, with a real engine


@dataclass
class Outcome:
    """What happened, and what was found."""

    options: Options
    faults: list[Fault]
    missed: list[str]  # failures that found nothing to hurt
    scene: Scene
    account: Account
    ends: dict[str, int] = field(default_factory=dict)  # results by how they ended
    figures: dict[str, float] = field(default_factory=dict)
