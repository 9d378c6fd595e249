"""The course of a job: send lists of rows, read the rows that end, until all have.

The service has the state: the rows that it accepted, and the order in which they ended. A run may stop at any
point; the next one sends the same rows under the same keys, which repeats nothing, and reads on behind the
last place that it has.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic

import msgspec

from llm_api_client.errors import APIStatusError, InvalidRequestError, LimitReachedError, problem_of
from llm_api_client.jobs.batches import MAX_ROWS, Batch
from llm_api_client.jobs.ordering import Ordering
from llm_api_client.jobs.output import AnswerFile
from llm_api_client.jobs.progress import Progress
from llm_api_client.jobs.records import EndedRow, JobInfo, Row, Value, failed_row
from llm_api_client.operations import jobs
from llm_api_client.operations.paging import MAX_PAGE
from llm_api_client.schemas import ResultError
from llm_api_client.steps import Call, Emit, Feed, Pause, Request, exchange

_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.1, 1.0
# Until more rows have ended than a few: small pages cost the service as much as large ones.
_FILL_SECONDS = 0.25
# Polls without a row, with none pending, after which no sent row can still appear.
_SILENT_POLLS = 5
# Refusals of one row that would meet every other row, too.
_OF_ALL_ROWS = frozenset({"unknown_model", "job_closed", "not_found", "forbidden"})


class _Outcome(msgspec.Struct):
    """The part of a reply to a list that is about one row."""

    id: str | None = None
    state: str | None = None
    code: str | None = None


@dataclass
class Course(Generic[Value]):
    """The runs of a job in this process.

    Attributes:
        job_id: of the job.
        batches: the rows to send; None if only the rows of earlier runs are read.
        window: most rows that are sent and not read; None: as many as the service takes.
        after: the place behind which rows are read.
    """

    job_id: str
    progress: Progress
    batches: Iterator[Batch] | None = None
    window: int | None = None
    after: int = 0
    output: AnswerFile | None = None
    ordering: Ordering | None = None
    parse: Callable[[str], Value] | None = None
    _refused: list[Batch] = field(default_factory=list)
    _list_rows: int = MAX_ROWS
    _resting_until: float = 0.0
    _pending: int = 0

    def rows(self) -> Feed[Row[Value]]:
        """The rows that end behind `after`, to the end of the job.

        Raises:
            AuthenticationError: the key was revoked; run the same again with another one.
            OutputError: the file of answers cannot be written.
        """
        if self.output is not None:
            self.after = self.output.open(self.job_id, self.after)
        self.progress.open()
        try:
            yield from self._all_rows()
            if self.ordering is not None:
                while len(self.ordering):
                    for row in self.ordering.skip():
                        yield Emit(row)
            if self.output is not None:
                self.output.finish()
        finally:
            self.progress.close()
            if self.output is not None:
                self.output.close()

    def _all_rows(self) -> Feed[Row[Value]]:
        is_sender = self.batches is not None
        info = yield from self._look()
        poll, silent = _MIN_POLL_SECONDS, 0
        while True:
            if self._may_send():
                yield from self._emit((yield from self._send_next()), are_refused=True)
            ended = yield from jobs.ended_page(self.job_id, after=self.after)
            if page := ended.rows:
                yield from self._emit([self.read(row) for row in page])
                self.after, poll, silent = page[-1].place, _MIN_POLL_SECONDS, 0
                self._pending = max(0, self._pending - len(page))
                if not ended.has_more and len(page) < MAX_PAGE and not self._may_send():
                    yield Pause(_FILL_SECONDS)
                continue
            # A job that another run sends is read until nothing of it is pending.
            is_silent = silent >= _SILENT_POLLS
            if self.batches is None and (info.state == "ended" or (is_silent and not is_sender)):
                return
            if is_silent and self.ordering is not None:
                for row in self.ordering.skip():
                    yield Emit(row)
            info = yield from self._look()
            silent = 0 if self._pending or self._may_send() else silent + 1
            if not self._may_send() and info.state != "ended":
                yield Pause(poll)
                poll = min(poll * 2, _MAX_POLL_SECONDS)

    def _look(self) -> Call[JobInfo]:
        info = yield from jobs.get(self.job_id)
        self._pending = info.counts.pending
        self.progress.show(info)
        return info

    def _emit(self, rows: list[Row[Value]], *, are_refused: bool = False) -> Feed[Row[Value]]:
        """Write rows, then hand them to the caller."""
        if self.output is not None:
            self.output.write(rows)
        self.progress.count(rows)
        shown: Iterable[Row[Value]] = rows
        if self.ordering is not None:
            (self.ordering.refuse if are_refused else self.ordering.end)(rows)
            shown = self.ordering.ready()
        for row in shown:
            yield Emit(row)

    # --- Sending -----------------------------------------------------------------------------------

    def _may_send(self) -> bool:
        if self.batches is None or time.monotonic() < self._resting_until:
            return False
        unread = self._pending if self.ordering is None else len(self.ordering)
        return self.window is None or unread < self.window

    def _send_next(self) -> Call[list[Row[Value]]]:
        """Send the next list; returns the rows that cannot end, because they were not accepted."""
        batch = self._next_batch()
        if batch is None:
            yield from jobs.close(self.job_id)
            self.batches = None
            return []
        if not batch.items:
            return batch.failed
        request = Request(
            "POST", "/results/", content=batch.encoded(self.job_id), is_busy_final=True
        )
        try:
            reply = yield from exchange(request)
        except (LimitReachedError, InvalidRequestError) as error:
            return batch.failed + self._send_later(batch, error)
        self._list_rows = min(MAX_ROWS, self._list_rows * 2)
        return batch.failed + self._outcomes(batch, reply.body)

    def _next_batch(self) -> Batch | None:
        assert self.batches is not None
        if self._refused:
            batch: Batch | None = self._refused.pop()
        else:
            batch = next(self.batches, None)
            if batch is not None and self.ordering is not None:
                self.ordering.expect(batch.order)
        if batch is not None and len(batch.items) > self._list_rows:
            batch, rest = batch.split(self._list_rows)
            self._refused.append(rest)
        return batch

    def _outcomes(self, batch: Batch, body: bytes) -> list[Row[Value]]:
        failed: list[Row[Value]] = []
        items = msgspec.json.decode(body, type=list[msgspec.Raw])
        for item, raw in zip(batch.items, items, strict=True):
            outcome = msgspec.json.decode(raw, type=_Outcome)
            if outcome.id is not None:
                self._pending += outcome.state == "pending"
            elif outcome.code in _OF_ALL_ROWS:
                raise problem_of(bytes(raw))
            elif outcome.code != "result_deleted":  # its row is among the ended ones
                failed.append(_refused_row(item.key, problem_of(bytes(raw))))
        return failed

    def _send_later(self, batch: Batch, error: APIStatusError) -> list[Row[Value]]:
        """A list that was refused as a whole: in parts if it is too large, later if the queue is full."""
        if error.status != 413 and error.retry_after is None:
            raise error
        if error.status == 413 and len(batch.items) == 1:
            return [_refused_row(batch.items[0].key, error)]
        self._refused.append(Batch(batch.items))
        self._list_rows = max(1, len(batch.items) // 2)
        if error.status == 429:
            self._resting_until = time.monotonic() + (error.retry_after or _MAX_POLL_SECONDS)
        return []

    # --- Reading -----------------------------------------------------------------------------------

    def read(self, row: EndedRow) -> Row[Value]:
        """A row with its text, its object and its error."""
        result = row.result
        if result is None:
            message = "The result was deleted before it was read."
            return failed_row(row.key, "result_deleted", message, place=row.place)
        error, value = result.error, None
        if error is None and self.parse is not None:
            try:
                value = self.parse(result.text)
            except ValueError as wrong:
                error = ResultError(code="invalid_output", message=str(wrong))
        return Row(
            key=row.key,
            text=result.text,
            vector=result.vector,
            scores=result.scores,
            value=value,
            error=error,
            result=result,
            place=row.place,
        )


def _refused_row(key: str, error: APIStatusError) -> Row[Any]:
    code = "duplicate_key" if error.code == "idempotency_conflict" else error.code
    return failed_row(key, code, str(error))
