"""The stored text of earlier attempts, as the next one gets it to continue."""

from dataclasses import replace

import orjson
import pytest

from app.core.ids import new_id
from app.queue.continuation import Interrupted, load_resumes
from app.queue.finish import AttemptOutcome
from app.queue.progress import Chunk
from tests.integration.queue.queue_bench import LOST, Bench, ended

INSERT = (
    'INSERT INTO result_chunks (result_id, attempt, "offset", text, prompt_tokens,'
    " completion_tokens, token_ids) VALUES ($1, $2, $3, $4, 7, $5, $6)"
)
FIRST, SECOND = b"\x01\0\0\0", b"\x02\0\0\0"


async def test_a_resume_has_the_attempts_of_the_present_text_alone(bench: Bench) -> None:
    """Not one that was dropped before it, nor any of the attempt that is to run."""
    interrupted = Interrupted(new_id(), 5, text_attempt=2, max_tokens=9, history=())
    for attempt, offset, text, tokens, ids in (
        (1, 0, "dropped", 1, FIRST),
        (2, 0, "ab", 1, FIRST),
        (4, 2, "c", 2, SECOND),
        (4, 3, "d", 3, FIRST),
        (5, 4, "new", 4, FIRST),
    ):
        await bench.connection.execute(INSERT, interrupted.id, attempt, offset, text, tokens, ids)
    resume = (await load_resumes(bench.connection, [interrupted]))[interrupted.id]
    assert (resume.text, resume.fault) == ("abcd", None)
    assert (resume.token_ids, resume.completion_tokens) == (FIRST + SECOND + FIRST, 3)
    assert resume.begins == ((2, 0), (4, 2))


async def test_token_ids_that_are_not_all_known_are_none(bench: Bench) -> None:
    interrupted = Interrupted(new_id(), 3, text_attempt=1, max_tokens=9, history=())
    await bench.connection.execute(INSERT, interrupted.id, 1, 0, "ab", 1, FIRST)
    await bench.connection.execute(INSERT, interrupted.id, 2, 2, "cd", 2, None)
    resume = (await load_resumes(bench.connection, [interrupted]))[interrupted.id]
    assert (resume.text, resume.token_ids, resume.fault) == ("abcd", None, None)
    whole = replace(interrupted, attempt=2)
    resume = (await load_resumes(bench.connection, [whole]))[interrupted.id]
    assert (resume.text, resume.token_ids) == ("ab", FIRST)


async def test_continuations_count_those_of_the_present_text(bench: Bench) -> None:
    """An attempt that starts over starts them, too."""
    (identifier,) = await bench.add(resumable=True)
    worker = await bench.worker()
    expected = [("ab", False, True, 0), ("abcd", True, True, 1), ("abcd", True, False, 0)]
    for text, continued, keeps, continuations in expected:
        await bench.fast_forward()
        claims = await bench.claim(worker) or await bench.queue.claim_suspects(worker, ["m"])
        lost = ended(
            claims[0], AttemptOutcome.RETURNED, output=text, failure=LOST,
            keeps_text=keeps, continued=continued,
        )  # fmt: skip
        assert await bench.end(worker, lost) == [True]
        row = await bench.row(identifier)
        assert (row["continuations"], row["text_attempt"]) == (continuations, 1 if keeps else None)


async def test_a_lost_worker_that_continued_is_counted_by_its_chunks(bench: Bench) -> None:
    """One that stored no text has continued nothing."""
    (identifier,) = await bench.add(resumable=True)
    found = []
    for offset, text in ((0, "ab"), (2, "c"), (3, "")):
        worker = await bench.worker(-1)
        (claim,) = await bench.claim(worker)
        if text:
            stored = Chunk(identifier, claim.attempt, offset, text, 7, claim.attempt, (), FIRST)
            await bench.queue.append(worker, [stored])
        assert await bench.queue.retire(worker) == 1
        row = await bench.row(identifier)
        found.append((row["text_attempt"], row["continuations"]))
    assert found == [(1, 0), (1, 1), (1, 1)]
    history = orjson.loads((await bench.row(identifier))["attempt_history"])
    assert [entry["continued_from"] for entry in history] == [2, 3]


@pytest.mark.parametrize("end", ["cancel", "expire"])
async def test_a_waiting_result_ends_with_its_own_kept_text(bench: Bench, end: str) -> None:
    identifiers = await bench.add(2, resumable=True)
    worker = await bench.worker()
    for claim, text in zip(await bench.claim(worker), ("one", "another"), strict=True):
        stored = Chunk(claim.id, claim.attempt, 0, text, len(text), 1, (), FIRST)
        await bench.queue.append(worker, [stored])
    assert await bench.queue.retire(worker) == 2
    if end == "cancel":
        assert await bench.queue.cancel("default", id=identifiers[0]) == 1
    else:
        late = "UPDATE results SET deadline_at = now() - interval '1 s' WHERE id = $1"
        await bench.connection.execute(late, identifiers[0])
        assert await bench.queue.expire() == 1
    row = await bench.row(identifiers[0])
    assert (row["output"], row["prompt_tokens"], row["completion_tokens"]) == ("one", 3, 1)
    assert (await bench.chunks(identifiers[0]), await bench.chunks(identifiers[1])) == (0, 1)
