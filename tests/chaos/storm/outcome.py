"""Parameters and outcome of a storm."""

from dataclasses import dataclass, field

from tests.chaos.storm.client import Scene
from tests.chaos.storm.faults import Fault
from tests.chaos.storm.invariants import Account


@dataclass(frozen=True)
class Options:
    """Duration, number of clients, and the seed of all random choices."""

    seed: str
    seconds: float = 600.0
    crowd: int = 48
    pause: float = 4.0  # seconds between two failures, on average
    with_vllm: bool = False  # a third server, with a real engine


@dataclass
class Outcome:
    """Counts of a storm, and the violations found."""

    options: Options
    faults: list[Fault]
    missed: list[str]  # failures that found nothing to hurt
    scene: Scene
    account: Account
    ends: dict[str, int] = field(default_factory=dict)  # results by how they ended
    figures: dict[str, float] = field(default_factory=dict)
