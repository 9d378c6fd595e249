"""Commands on a profile's host: none of them holds up the event loop."""

import subprocess
import threading
from pathlib import Path

import pytest

from app.provisioning.hosts import Hosts
from tests.integration.provisioning.test_model_download import profile_of


async def test_a_command_that_does_not_end_when_killed_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that waits for a dead file system: its end is waited for, but not by the loop."""
    released, ended = threading.Event(), threading.Event()
    wait = subprocess.Popen.wait

    def wait_long(process: subprocess.Popen[bytes]) -> int:
        released.wait(10)
        status = wait(process)
        ended.set()
        return status

    monkeypatch.setattr(subprocess.Popen, "wait", wait_long)
    async with Hosts() as hosts:
        lines = hosts.follow(profile_of(tmp_path), ["sh", "-c", "echo begun; sleep 300"])
        assert await anext(lines) == "begun\n"
        await lines.aclose()
        assert not ended.is_set()
        released.set()
        assert ended.wait(30)
