"""Records of jobs: a job with its counts, and the rows of its results."""

import html
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Literal

import msgspec

from llm_api_client import notebook
from llm_api_client.errors import LLMAPIError
from llm_api_client.schemas import Record, Result, ResultError, Usage

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # Type of `Row.value`: None unless `map` has `structured`.
    Value = TypeVar("Value", default=None)
else:
    from typing import TypeVar

    Value = TypeVar("Value")


class JobCounts(Record, frozen=True):
    """Rows of a job by state; `rows` is their sum."""

    rows: int = 0
    pending: int = 0
    completed: int = 0
    failed: int = 0


class JobInfo(Record, frozen=True):
    """A job: `open` until all of its rows are sent, `closed`, then `ended` with its last row."""

    id: str
    state: Literal["open", "closed", "ended"]
    name: str = ""
    key: str | None = None
    total: int | None = None
    priority: int = 0
    deadline_seconds: float | None = None
    webhook_url: str | None = None
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    counts: JobCounts = JobCounts()
    # Failed rows by error code.
    errors: dict[str, int] = msgspec.field(default_factory=dict)
    last_place: int | None = None  # in the order of ends
    estimated_seconds_left: float | None = None
    usage: Usage = Usage()
    created_at: datetime | None = None
    closed_at: datetime | None = None
    cancel_requested_at: datetime | None = None
    ended_at: datetime | None = None

    def _repr_html_(self) -> str:
        counts = self.counts
        total = counts.rows if self.state != "open" else self.total
        left = self.estimated_seconds_left
        errors = ", ".join(f"{code}: {number:,}" for code, number in self.errors.items())
        return notebook.table(
            [
                ("job", html.escape(self.id)),
                ("name", html.escape(self.name) or None),
                ("state", notebook.state(self.state)),
                ("rows", notebook.bar(counts.completed + counts.failed, counts.failed, total)),
                ("time left", left and notebook.duration(left)),
                ("errors", html.escape(errors) or None),
                ("tokens", f"{self.usage.completion_tokens or 0:,}"),
            ]
        )


class EndedRow(msgspec.Struct, frozen=True):
    """A row as the service lists it; its place rises in the order of ends."""

    place: int
    key: str
    result_id: str
    state: Literal["completed", "failed"]
    result: Result | None = None


class KeyedRow(msgspec.Struct, frozen=True):
    """A row by its key; `place` is None until it has ended and is among the ended rows."""

    key: str
    place: int | None = None


class RefusedRow(Record, frozen=True):
    """A failed row that cannot be sent again."""

    key: str
    result_id: str
    error: dict[str, Any]


class RetriedRows(Record, frozen=True):
    """A batch of retries; `following` is None after the last one."""

    retried: int
    refused: list[RefusedRow] = msgspec.field(default_factory=list)
    following: int | None = None


class RowFailedError(LLMAPIError):
    """A row has no answer; `row` has its error."""

    def __init__(self, row: "Row[Any]") -> None:
        assert row.error is not None
        super().__init__(f"Row {row.key}: {row.error}")
        self.row = row


class Row(msgspec.Struct, Generic[Value], frozen=True, kw_only=True):
    """The answer to one row of the data, or its error.

    Attributes:
        key: the row's key in its job.
        text: the generated text; of a failed row the text so far.
        vector: the vector, with `embedding`; otherwise None.
        scores: of the documents in their order, with `score`; otherwise None.
        value: the text as an object of `structured`, otherwise None.
        error: the reason, if there is no answer: an error of the service (docs/errors.md), or
            `invalid_row`, `duplicate_key`, `invalid_output`, `result_deleted`.
        result: the whole result; None for a row that was not sent.
        place: position in the order of ends; None for a row that was not sent.
        input: the row of the data, with `order="input"`.
    """

    key: str
    text: str = ""
    vector: list[float] | None = None
    scores: list[float] | None = None
    value: Value | None = None
    error: ResultError | None = None
    result: Result | None = None
    place: int | None = None
    input: Any = None

    def checked(self) -> "Row[Value]":
        """This row if it has an answer.

        Raises:
            RowFailedError: it has none.
        """
        if self.error is not None:
            raise RowFailedError(self)
        return self


def failed_row(
    key: str,
    code: str,
    message: str,
    *,
    input: Any = None,  # noqa: A002 - as the member
    place: int | None = None,
) -> Row[Any]:
    """A row that has an error of its own."""
    return Row(key=key, error=ResultError(code=code, message=message), input=input, place=place)
