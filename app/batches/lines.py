"""The lines of a batch's files: JSON lines as OpenAI's Batch API has them.

https://platform.openai.com/docs/guides/batch
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from uuid import UUID

import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from app.batches.dialect import BatchDialect
from app.batches.rows import Batch, End, Line, LineOutcome, NewLine
from app.core.errors import ServiceError
from app.core.json_lines import on_one_line

_MAX_ERRORS = 100  # that are reported of a file
_MAX_CUSTOM_ID = 512
_LINES_PER_TURN = 2_000  # that are split before other tasks run

_STOPPED = {
    "cancelled": "This request was not finished when the batch was cancelled.",
    "expired": "This request could not be executed before the completion window expired.",
}


class _LineRequest(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    custom_id: Annotated[str, Field(min_length=1, max_length=_MAX_CUSTOM_ID, pattern=r"^[^\x00]*$")]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


_LINE = TypeAdapter(_LineRequest)


class LineReader:
    """Reads the lines of an input file one by one, and collects their errors."""

    def __init__(self, endpoint: str, max_lines: int) -> None:
        self.errors: list[dict[str, object]] = []
        self.total = 0
        self._endpoint = endpoint
        self._max_lines = max_lines
        self._custom_ids: set[str] = set()

    @property
    def is_full(self) -> bool:
        """True once no further errors are reported: the rest of the file need not be read."""
        return len(self.errors) >= _MAX_ERRORS

    def read(self, number: int, content: bytes) -> NewLine | None:
        if not content.strip():
            return None
        self.total += 1
        if self.total == self._max_lines + 1:
            self.refuse(
                "too_many_requests_in_batch",
                f"A batch may have at most {self._max_lines} requests (LLM_MAX_BATCH_LINES).",
                number,
            )
        try:
            value = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            self.refuse("invalid_json_line", f"This line is not valid JSON: {error}.", number)
            return None
        try:
            request = _LINE.validate_python(value)
        except ValidationError as error:
            for one in error.errors()[:_MAX_ERRORS]:
                field = ".".join(str(part) for part in one["loc"]) or "line"
                self.refuse("invalid_request", one["msg"], number, field)
            return None
        return self._check(number, request)

    def refuse(
        self, code: str, message: str, line: int | None = None, param: str | None = None
    ) -> None:
        if not self.is_full:
            self.errors.append({"code": code, "message": message, "line": line, "param": param})

    def _check(self, number: int, request: _LineRequest) -> NewLine | None:
        try:
            body = orjson.dumps(request.body).decode()
        except (TypeError, ValueError):  # it reads deeper nesting than it writes
            self.refuse("invalid_json_line", "The body is nested too deep.", number, "body")
            return None
        if request.custom_id in self._custom_ids:
            self.refuse(
                "duplicate_custom_id",
                f"The custom_id {request.custom_id!r} is another line's.",
                number,
                "custom_id",
            )
            return None
        self._custom_ids.add(request.custom_id)
        if request.url != self._endpoint:
            self.refuse(
                "invalid_url", f"Must be the batch's endpoint, {self._endpoint}.", number, "url"
            )
            return None
        for name in ("stream", "background"):
            if request.body.get(name):
                self.refuse("invalid_request", "Has no meaning in a batch.", number, f"body.{name}")
                return None
        return NewLine(number, request.custom_id, body)


def line_to_wire(
    batch_id: UUID, line: int, custom_id: str, *, response: object = None, error: object = None
) -> str:
    wire = orjson.dumps(
        {
            "id": f"batch_req_{batch_id}_{line}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
    )
    return on_one_line(wire).decode()


@dataclass(slots=True, frozen=True)
class LineOutcomes:
    batch_id: UUID
    dialect: BatchDialect

    def completed(self, line: Line, body: object) -> LineOutcome:
        return self._with_response(line, 200, body, is_completed=True)

    def refused(self, batch: Batch, line: Line, error: ServiceError) -> LineOutcome:
        """The outcome of a line that its endpoint refuses, or whose result failed."""
        return self._with_response(
            line, *self.dialect.refuse(batch.endpoint, error), is_completed=False
        )

    def stopped(self, line: Line, end: End) -> LineOutcome:
        """The outcome of a line without a response when its batch was stopped."""
        error = {"code": f"batch_{end}", "message": _STOPPED[end]}
        wire = line_to_wire(self.batch_id, line.line, line.custom_id, error=error)
        return LineOutcome(line.line, False, wire)

    def _with_response(
        self, line: Line, status: int, body: object, *, is_completed: bool
    ) -> LineOutcome:
        response = {
            "status_code": status,
            "request_id": str(line.result_ids[0]) if line.result_ids else None,
            "body": body,
        }
        wire = line_to_wire(self.batch_id, line.line, line.custom_id, response=response)
        return LineOutcome(line.line, is_completed, wire)


async def split_lines(parts: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[bytes | None]:
    """The lines of a file that comes in parts; None for one that is longer than `max_bytes`."""
    rest = bytearray()
    is_too_long = False
    is_first = True
    async for part in parts:
        if is_first:
            part = part.removeprefix(b"\xef\xbb\xbf")  # editors' mark of UTF-8
            is_first = False
        *lines, last = part.split(b"\n")
        for place, line in enumerate(lines, 1):
            if not place % _LINES_PER_TURN:
                await asyncio.sleep(0)  # the lines of one part may be a million
            whole = bytes(rest) + line
            yield None if is_too_long or len(whole) > max_bytes else whole
            rest.clear()
            is_too_long = False
        rest += last
        if len(rest) > max_bytes:
            rest.clear()
            is_too_long = True
    if rest or is_too_long:
        yield None if is_too_long else bytes(rest)
