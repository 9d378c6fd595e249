"""The ends of launches that their use and their start decide, without a job."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.core.database import Database
from app.core.listener import Listener
from app.core.settings import Settings
from app.provisioning.launched_servers import LaunchedServers
from app.provisioning.profiles import Profile
from app.provisioning.reconciler import Reconciler
from app.provisioning.store import ClaimedLaunch, Step
from tests.unit.provisioning.test_launch_requests import profiles

__all__ = ["profiles"]

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
FOUND = Step("starting", 1.0, address={"grpc": "127.0.0.1:1"})


class Servers:
    """The registered servers; one of them may have running results."""

    def __init__(self) -> None:
        self.is_running = False

    async def register(self, *_: object) -> None: ...

    async def has_running(self, _launch: object) -> bool:
        return self.is_running


@pytest.fixture
def reconciler(profiles: dict[str, Profile]) -> Reconciler:
    settings = Settings.model_construct(launch_poll_seconds=5.0, launch_lease_seconds=60.0)
    listener = SimpleNamespace(subscribe=lambda *_: None)
    made = Reconciler(cast(Database, None), cast(Listener, listener), settings, profiles)
    made._servers = cast(LaunchedServers, Servers())
    return made


def launch_of(idle_minutes: float = 30, **columns: Any) -> ClaimedLaunch:
    """A launch that is healthy since long, last used `unused` minutes ago."""
    unused = columns.pop("unused", 60)
    row = {
        "spec": SimpleNamespace(idle_minutes=idle_minutes, start_minutes=10), "now": NOW, "reason": "",
        "healthy_at": NOW - timedelta(hours=9), "last_used_at": NOW - timedelta(minutes=unused),
    }  # fmt: skip
    return cast(ClaimedLaunch, SimpleNamespace(**row | columns))


@pytest.mark.parametrize(
    ("launch", "is_used", "is_running", "is_stopped"),
    [
        (launch_of(unused=30), False, False, True),
        (launch_of(unused=29.9), False, False, False),
        (launch_of(), True, False, False),
        (launch_of(), False, True, False),  # a result that takes longer than the idle time
        (launch_of(0), False, False, False),  # it is never idle
        (launch_of(healthy_at=None), False, False, False),  # it has just become ready
        (launch_of(last_used_at=None), False, False, False),
    ],
)
async def test_a_server_stops_once_nothing_has_used_it_for_its_idle_time(
    reconciler: Reconciler, profiles: dict[str, Profile],
    launch: ClaimedLaunch, is_used: bool, is_running: bool, is_stopped: bool,
) -> None:  # fmt: skip
    cast(Servers, reconciler._servers).is_running = is_running
    profile = next(iter(profiles.values()))
    step = await reconciler._serve(launch, profile, FOUND, is_used=is_used)
    if is_stopped:
        assert (step.state, step.end_state, step.pause) == ("stopping", "stopped", 0)
        assert step.reason == "idle for 30 minutes"
    else:
        assert (step.state, step.end_state, step.pause) == ("healthy", None, 5.0)
        assert step.used is (is_used or is_running or launch.healthy_at is None)


@pytest.mark.parametrize(
    ("columns", "state", "reason"),
    [
        ({"healthy_at": None, "started_at": NOW - timedelta(minutes=9)}, "starting", ""),
        ({"healthy_at": None, "started_at": None}, "starting", ""),
        ({"healthy_at": None, "started_at": NOW - timedelta(minutes=10)}, "stopping",
         "the model was not ready 10 minutes after the job's start"),
        ({"started_at": NOW - timedelta(hours=9)}, "unhealthy", "no answer"),
    ],
)  # fmt: skip
def test_a_server_that_does_not_answer_fails_at_its_start_alone(
    reconciler: Reconciler, columns: dict[str, Any], state: str, reason: str
) -> None:
    step = reconciler._not_ready(launch_of(**columns), FOUND, "no answer")
    assert (step.state, step.reason) == (state, reason)
    assert step.end_state == ("failed" if state == "stopping" else None)
