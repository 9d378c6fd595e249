"""A short run of `make attack`, without a limit on memory and without bounds on times."""

from pathlib import Path

import pytest

from app.cli.up.triton import EmbeddedTriton
from tests.postgres import PostgresServer
from tests.security.hostile.attack_process import ATTACKS
from tests.security.hostile.run import Options, run


@pytest.mark.timeout(300)
@pytest.mark.trial
async def test_a_polite_team_beside_a_hostile_one(
    postgres_server: PostgresServer, database_name: str, triton: EmbeddedTriton, tmp_path: Path
) -> None:
    """25 s: every attack about once, on the service's own processes. `make attack` bounds times, too."""
    options = Options("suite", 2, 10, attackers=6, scale=0.05, streams=100, requests=20)
    outcome = await run(tmp_path, postgres_server, database_name, triton, options)
    assert not outcome.faults, "\n".join(outcome.faults)
    assert len(outcome.beside.whole) >= 20
    assert len(outcome.account.statuses) >= len(ATTACKS) // 4  # the others are on their way
