"""Outcomes of a batch's lines in the memory of a worker: bounded in bytes, not only in lines."""

from uuid import UUID

import asyncpg

from app.batches.in_flight import InFlightLines
from app.batches.rows import Line
from app.core.ids import new_id
from tests.conftest import Service
from tests.security.test_answer_bytes import LONG, api, fill, settings

__all__ = ["api", "settings"]


def test_a_line_that_ended_has_the_size_of_all_its_outputs() -> None:
    lines = InFlightLines()
    ids = [new_id() for _ in range(4)]
    lines.add(Line(1, "1", "", ids[:2]), None)
    lines.add(Line(2, "2", "", ids[2:]), None)
    assert not lines.remove_results({ids[0]: 5, ids[2]: 30})
    ended = lines.remove_results({ids[1]: 7, ids[3]: 40, new_id(): 100})
    assert [(one.line.line, one.size) for one in ended] == [(1, 12), (2, 70)]


async def test_outcomes_are_read_in_pages_of_bytes(
    api: Service, connection: asyncpg.Connection
) -> None:
    batch = new_id()
    await connection.execute(
        """INSERT INTO batches (id, team_id, endpoint, input_file_id, completion_window, expires_at)
        VALUES ($1, 'default', '/v1/completions', $1, '24h', now())""",
        batch,
    )
    await connection.execute(
        """INSERT INTO batch_lines (batch_id, line, custom_id, state, is_completed, outcome)
        SELECT $1, n, n::text, 'done', true, repeat('x', $2) FROM generate_series(1, 20) n""",
        *(batch, LONG),
    )
    read: list[int] = []
    pages = 0
    while page := await api.services.batch_work.outcomes(batch, read[-1] if read else 0, 100):
        assert sum(len(one.outcome) for one in page) <= 9 * LONG
        read += [one.line for one in page]
        pages += 1
    assert read == list(range(1, 21))
    assert pages >= 3


async def test_sizes_of_results_are_known_before_they_are_read(
    api: Service, connection: asyncpg.Connection
) -> None:
    ids, gone = [UUID(one) for one in await fill(connection, 2)], new_id()
    sizes = await api.services.batch_work.over([*ids, gone])
    assert sizes == dict.fromkeys(ids, LONG) | {gone: 0}
