"""The course of a job: send lists of rows, read the rows that end, until all have.

The service has the state: the rows that it accepted, and the order in which they ended. A run may stop at any
point; the next one sends the same rows under the same keys, which repeats nothing, and reads on behind the
last place that it has.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic

import msgspec

from llm_api_client.errors import (
    APIStatusError,
    ConflictError,
    InvalidRequestError,
    LimitReachedError,
    NotFoundError,
    ServiceUnavailableError,
    problem_of,
)
from llm_api_client.jobs.batches import MAX_ROWS, Batch, Item
from llm_api_client.jobs.ordering import Ordering
from llm_api_client.jobs.output import AnswerFile
from llm_api_client.jobs.progress import Progress
from llm_api_client.jobs.records import EndedRow, JobInfo, Row, Value, failed_row
from llm_api_client.operations import jobs
from llm_api_client.operations.paging import MAX_PAGE
from llm_api_client.retries import Patience
from llm_api_client.schemas import ResultError
from llm_api_client.steps import Call, Emit, Feed, Pause, Request, exchange

_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.1, 1.0
# Until more rows have ended than a few: small pages cost the service as much as large ones.
_FILL_SECONDS = 0.25
# Polls without a row, with none pending, after which a reader does not wait for rows of other runs.
_SILENT_POLLS = 5
# Seconds for which a job waits for a service that does not respond, or takes none of its rows: upgrades,
# failovers.
PATIENCE_SECONDS = 3600.0
# Refusals of one row that would meet every other row, too.
_OF_ALL_ROWS = frozenset({"unknown_model", "not_found", "forbidden"})
# The row has ended, and is among those that are read.
_ENDED = frozenset({"result_deleted", "erased"})
_MAX_JOB_ROWS = "max_job_rows"


# A row, and the reason why it was not accepted.
_Refusal = tuple[Item, APIStatusError]


class _Outcome(msgspec.Struct):
    """The part of a reply to a list that is about one row."""

    id: str | None = None
    state: str | None = None
    code: str | None = None
    status: int = 0
    limit: str | None = None

    @property
    def is_transient(self) -> bool:
        """True if the same row may be accepted later: it is not lost yet."""
        is_busy = self.status == 429 and self.limit != _MAX_JOB_ROWS
        return is_busy or self.status >= 500


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
    clock: Callable[[], float] = time.monotonic
    # Rows that were refused for the moment: they go before further ones, but behind each other, so that
    # none that is refused again and again delays the others.
    _refused: deque[Batch] = field(default_factory=deque)
    # Since the service answers with errors of its own, and has accepted no row.
    _patience: Patience | None = None
    _list_rows: int = MAX_ROWS
    _resting_until: float = 0.0
    _pending: int = 0
    _run: object = None
    # The last place in the file of answers.
    _written: int = 0

    def rows(self) -> Feed[Row[Value]]:
        """The rows that end behind `after`, to the end of the job.

        Raises:
            AuthenticationError: the key was revoked; run the same again with another one.
            ConfigurationError: another process writes the file of answers, for example.
            OutputError: the file of answers cannot be written.
        """
        is_first, run = self._run is None, object()
        self._run = run
        if self.output is not None:
            self._written = self.output.open(self.job_id)
            if is_first:
                self.after = max(self.after, self._written)
        self.progress.open()
        try:
            yield from self._all_rows()
            if self.ordering is not None:
                while len(self.ordering):
                    yield from self._emit(self.ordering.skip())
            if self.output is not None:
                self.output.finish()
        finally:
            # An asynchronous loop that was left ends behind the beginning of the next one.
            if self._run is run:
                self.progress.close()
                if self.output is not None:
                    self.output.close()

    def _all_rows(self) -> Feed[Row[Value]]:
        is_sender = self.batches is not None
        info = yield from self._look()
        poll, silent = _MIN_POLL_SECONDS, 0
        while True:
            if self._may_send():
                yield from self._refuse((yield from self._send_next()))
            ended = yield from jobs.ended_page(self.job_id, after=self.after)
            if page := ended.rows:
                poll, silent = _MIN_POLL_SECONDS, 0
                yield from self._end(page)
                self._pending = max(0, self._pending - len(page))
                if not ended.has_more and len(page) < MAX_PAGE and not self._may_send():
                    yield Pause(_FILL_SECONDS)
                continue
            # A job that another run sends is read until nothing of it is pending.
            is_silent = silent >= _SILENT_POLLS
            is_anothers = info.state == "open" and not is_sender
            if self.batches is None and (info.state == "ended" or (is_silent and is_anothers)):
                return
            if is_silent and self.ordering is not None:
                yield from self._skip_repeated(self.ordering)
            info = yield from self._look()
            silent = 0 if self._pending or self._has_rest() else silent + 1
            if not self._may_send() and (self.batches is not None or info.state != "ended"):
                yield Pause(poll)
                poll = min(poll * 2, _MAX_POLL_SECONDS)

    def _skip_repeated(self, ordering: Ordering) -> Feed[Row[Value]]:
        """Name the row whose turn it is if it repeats one that was read: it will not be read again.

        Otherwise it is still to be sent, to end, or to get its place.
        """
        if (key := ordering.first_key) is None:
            return
        (found,) = yield from jobs.keyed_rows(self.job_id, [key])
        if found.place is not None and found.place <= self.after:
            yield from self._emit(ordering.skip())

    def _look(self) -> Call[JobInfo]:
        info = yield from jobs.get(self.job_id)
        self._pending = info.counts.pending
        self.progress.show(info)
        return info

    def _end(self, page: list[EndedRow]) -> Feed[Row[Value]]:
        """Write ended rows, then hand them to the caller: a loop that is left repeats none, and omits none."""
        rows = [self.read(row) for row in page]
        if self.output is not None:
            self.output.write([row for row in rows if (row.place or 0) > self._written])
            self._written = max(self._written, page[-1].place)
        self.progress.count(rows)
        if self.ordering is not None:
            self.ordering.end(rows)
            self.after = page[-1].place
            yield from self._emit(self.ordering.ready())
            return
        for row in rows:
            self.after = row.place or self.after
            yield Emit(row)

    def _refuse(self, rows: list[Row[Value]]) -> Feed[Row[Value]]:
        """Write rows that were not accepted, then hand them to the caller."""
        if self.output is not None:
            self.output.write(rows)
        if self.ordering is not None:
            self.ordering.refuse(rows)
        yield from self._emit(rows if self.ordering is None else self.ordering.ready())

    def _emit(self, rows: Iterable[Row[Value]]) -> Feed[Row[Value]]:
        for row in rows:
            yield Emit(row)

    # --- Sending -----------------------------------------------------------------------------------

    def _has_rest(self) -> bool:
        """True if rows are to be sent, now or after a rest, before those that were sent have ended."""
        return bool(self._refused) or self._may_send()

    def _may_send(self) -> bool:
        if self.batches is None or self.clock() < self._resting_until:
            return False
        if self.ordering is None:
            return self.window is None or self._pending < self.window
        # Refused rows are in the window already: it stays full until they are answered.
        return bool(self._refused) or self.window is None or len(self.ordering) < self.window

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
        except (LimitReachedError, InvalidRequestError, ServiceUnavailableError) as error:
            return batch.failed + self._send_later(batch, error)
        self._list_rows = min(MAX_ROWS, self._list_rows * 2)
        return batch.failed + (yield from self._outcomes(batch, reply.body))

    def _next_batch(self) -> Batch | None:
        assert self.batches is not None
        if self._refused:
            batch: Batch | None = self._refused.popleft()
        else:
            batch = next(self.batches, None)
            if batch is not None and self.ordering is not None:
                self.ordering.expect(batch.order)
        if batch is not None and len(batch.items) > self._list_rows:
            batch, rest = batch.split(self._list_rows)
            self._refused.appendleft(rest)
        return batch

    def _outcomes(self, batch: Batch, body: bytes) -> Call[list[Row[Value]]]:
        """The rows of a list that are refused for good; those that are not are sent later."""
        failed, later, missing = list[_Refusal](), list[_Refusal](), list[_Refusal]()
        items = msgspec.json.decode(body, type=list[msgspec.Raw])
        for item, raw in zip(batch.items, items, strict=True):
            outcome = msgspec.json.decode(raw, type=_Outcome)
            if outcome.id is not None:
                self._pending += outcome.state == "pending"
                self._patience = None
            elif outcome.code not in _ENDED:
                refusal = item, problem_of(bytes(raw))
                if outcome.code in _OF_ALL_ROWS:
                    raise refusal[1]
                is_closed = outcome.code == "job_closed"
                kind = missing if is_closed else later if outcome.is_transient else failed
                kind.append(refusal)
        if missing:
            yield from self._open_again(missing[0][1])
            self._refused.append(Batch([item for item, _ in missing]))
        if later and not self._rest(max((error for _, error in later), key=_status)):
            failed += later
        elif later:
            self._refused.append(Batch([item for item, _ in later]))
        return [_refused_row(item.key, error) for item, error in failed]

    def _open_again(self, closed: APIStatusError) -> Call[None]:
        """Open a job that was closed before all of its rows were sent; not one that was cancelled."""
        try:
            yield from jobs.open_again(self.job_id)
        except (ConflictError, NotFoundError, InvalidRequestError):
            raise closed from None  # cancelled, or of a service that does not open jobs again

    def _send_later(self, batch: Batch, error: APIStatusError) -> list[Row[Value]]:
        """A list that was refused as a whole: in parts if it is too large, later if the service is busy."""
        if error.status == 413 and len(batch.items) == 1:
            return [_refused_row(batch.items[0].key, error)]
        if error.status != 413 and not self._rest(error):
            raise error
        self._refused.append(Batch(batch.items))
        self._list_rows = max(1, len(batch.items) // 2)
        return []

    def _rest(self, error: APIStatusError) -> bool:
        """Send nothing for a while; False if another try is useless, or has been for too long.

        A queue that is full is waited for as long as it is.
        """
        pause: float | None = error.retry_after or _MAX_POLL_SECONDS
        if error.status >= 500:
            self._patience = self._patience or Patience(PATIENCE_SECONDS, self.clock)
            pause = self._patience.next_pause(error.retry_after)
        elif error.status != 429:
            return False
        if pause is None:
            return False
        self._resting_until = self.clock() + pause
        return True

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


def _status(error: APIStatusError) -> int:
    return error.status


def _refused_row(key: str, error: APIStatusError) -> Row[Any]:
    code = "duplicate_key" if error.code == "idempotency_conflict" else error.code
    return failed_row(key, code, str(error))
