"""Last writes that PostgreSQL refuses, by batchers of the test."""

from typing import cast

import pytest

from app.core.errors import DatabaseUnavailableError, FailureCode
from app.core.ids import new_id
from app.queue.finish import AttemptEnd, AttemptOutcome
from app.queue.job_queue import JobQueue
from app.queue.progress import Chunk
from app.worker.end_writer import EndWriter


class Refusing:
    """Queue and batcher: raises an error at its first items."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.items: list[object] = []

    def end_batcher(self, *_: object) -> "Refusing":
        return self

    def chunk_batcher(self, *_: object) -> "Refusing":
        return self

    async def submit(self, item: object) -> bool:
        self.items.append(item)
        if self.errors:
            raise self.errors.pop(0)
        return True


CHUNK = Chunk(new_id(), 1, 0, "text", None, None)
END = AttemptEnd(new_id(), 1, AttemptOutcome.COMPLETED, "text")


async def test_a_refused_end_is_written_without_its_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = Refusing(ValueError("a character"))
    assert await EndWriter(cast(JobQueue, queue), new_id(), None).write(END)
    first, second = cast(list[AttemptEnd], queue.items)
    assert (first, second.output, second.outcome) == (END, "", AttemptOutcome.FAILED)
    assert second.failure is not None
    assert second.failure.code is FailureCode.INTERNAL_ERROR
    assert [vars(record)["action"] for record in caplog.records] == ["end_refused"]


async def test_a_refused_text_does_not_prevent_the_end(caplog: pytest.LogCaptureFixture) -> None:
    writer = EndWriter(cast(JobQueue, Refusing(ValueError("a character"))), new_id(), None)
    await writer.store_last_text(CHUNK)
    assert [vars(record)["action"] for record in caplog.records] == ["text_refused"]


async def test_a_write_without_a_database_is_not_refused() -> None:
    """Its batcher waits for the database; an error is that of a batcher that was closed."""
    away = DatabaseUnavailableError("away")
    queue = Refusing(away, away)
    writer = EndWriter(cast(JobQueue, queue), new_id(), None)
    with pytest.raises(DatabaseUnavailableError):
        await writer.store_last_text(CHUNK)
    with pytest.raises(DatabaseUnavailableError):
        await writer.write(END)
    assert queue.items == [CHUNK, END]
