"""The stored text of a running result, from the place of a reader of any of its attempts."""

from uuid import UUID

import asyncpg

from app.core.ids import new_id
from app.core.settings import Settings
from app.results.stored_text import read_texts
from tests.integration.queue.queue_bench import open_bench

Chunks = list[tuple[int, int, str]]  # attempt, offset, text
Place = tuple[int, int, bool]  # attempt, known code points, whether the reader continues

# By the attempt that began the text, and the present one.
RESTARTED: tuple[int | None, int, Chunks] = (None, 2, [(1, 0, "old"), (2, 0, "ab"), (2, 2, "cd")])
CONTINUED = (1, 2, [(1, 0, "abcd"), (2, 4, "ef")])
# The third attempt has stored nothing; the second continued the first at 4.
THIRD = (1, 3, [(1, 0, "aaaa"), (2, 4, "dd")])
SECOND_TEXT = (2, 3, [(1, 0, "zzzz"), (2, 0, "ab"), (3, 2, "cd")])
EMPTY: tuple[int | None, int, Chunks] = (1, 2, [])


async def store(
    settings: Settings,
    connection: asyncpg.Connection,
    text_attempt: int | None,
    attempt: int,
    chunks: Chunks,
) -> UUID:
    async with open_bench(settings) as bench:
        (result_id,) = await bench.add()
    await connection.execute(
        "UPDATE results SET attempt = $2, text_attempt = $3 WHERE id = $1",
        *(result_id, attempt, text_attempt),
    )
    await connection.executemany(
        """INSERT INTO result_chunks (result_id, attempt, "offset", text, completion_tokens, logprobs)
           VALUES ($1, $2, $3, $4, $5, $6)""",
        [(result_id, *one, one[1] + len(one[2]), f"[{one[1]}]") for one in chunks],
    )
    return result_id


async def test_each_reader_gets_the_rest_of_the_present_text(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    """A reader of an earlier attempt keeps what its successors kept, if it may continue."""
    cases: list[tuple[tuple[int | None, int, Chunks], Place, tuple[int, str]]] = [
        (RESTARTED, (2, 0, False), (0, "abcd")),
        (RESTARTED, (2, 1, False), (1, "bcd")),
        (RESTARTED, (2, 2, True), (2, "cd")),
        (RESTARTED, (2, 4, True), (4, "")),
        (RESTARTED, (1, 3, True), (0, "abcd")),
        (CONTINUED, (1, 8, True), (4, "ef")),
        (CONTINUED, (1, 2, True), (2, "cdef")),
        (CONTINUED, (1, 8, False), (0, "abcdef")),
        (CONTINUED, (2, 5, False), (5, "f")),
        (CONTINUED, (2, 3, True), (3, "def")),
        (THIRD, (2, 9, True), (6, "")),
        (THIRD, (2, 5, True), (5, "d")),
        (THIRD, (1, 12, True), (4, "dd")),
        (THIRD, (3, 6, True), (6, "")),
        (THIRD, (3, 0, True), (0, "aaaadd")),
        (SECOND_TEXT, (1, 4, True), (0, "abcd")),
        (SECOND_TEXT, (2, 1, True), (1, "bcd")),
        (EMPTY, (1, 5, True), (0, "")),
        (EMPTY, (2, 0, True), (0, "")),
    ]
    results: dict[int, UUID] = {}
    for stored, _, _ in cases:
        if id(stored) not in results:
            results[id(stored)] = await store(settings, connection, *stored)
    places = [(results[id(stored)], *place) for stored, place, _ in cases]
    found = await read_texts(connection, places, False)
    for (stored, place, expected), one in zip(cases, found, strict=True):
        assert one is not None
        assert (one.begins, one.text) == expected, (stored, place)
        assert (one.is_pending, one.attempt, one.has_more) == (True, stored[1], False)


async def test_a_long_text_is_read_in_parts(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    """Each part has 64 chunks, with the tokens of whole chunks behind the reader's place."""
    chunks = [(1, place, "x") for place in range(66)]
    result_id = await store(settings, connection, None, 1, chunks)
    first, second, third = await read_texts(
        connection, [(result_id, 1, after, False) for after in (0, 3, 64)], False
    )
    assert first is not None
    assert second is not None
    assert third is not None
    assert (len(first.text), first.has_more, first.completion_tokens) == (64, True, 64)
    assert first.logprobs == [f"[{place}]" for place in range(64)]
    assert (len(second.text), second.has_more, second.completion_tokens) == (63, False, 66)
    assert (third.text, third.logprobs) == ("xx", ["[64]", "[65]"])


async def test_a_reader_within_a_chunk_gets_its_text_without_its_tokens(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    chunks = [(1, 0, "abcd"), (1, 4, "ef")]
    result_id = await store(settings, connection, None, 1, chunks)
    await connection.execute('UPDATE result_chunks SET logprobs = NULL WHERE "offset" = 4')
    ((within, begin), (other,)) = (
        await read_texts(connection, [(result_id, 1, 2, False), (result_id, 1, 0, False)], False),
        await read_texts(connection, [(new_id(), 1, 0, False)], False),
    )
    assert within is not None
    assert (within.text, list(within.logprobs)) == ("cdef", [])
    assert begin is not None
    assert list(begin.logprobs) == ["[0]"]
    assert other is None


async def test_an_ended_result_has_no_stored_text(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    result_id = await store(settings, connection, *RESTARTED)
    await connection.execute(
        "UPDATE results SET state = 'completed', output = 'x', finished_at = now()"
    )
    (found,) = await read_texts(connection, [(result_id, 2, 1, True)], False)
    assert found is not None
    assert (found.is_pending, found.attempt, found.text) == (False, 2, "")
    assert (found.has_more, found.completion_tokens) == (False, None)
