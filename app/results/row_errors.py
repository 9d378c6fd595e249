"""Errors of requests whose result has failed or is erased."""

from app.core.errors import ErasedError, FailureCode, ResultFailedError
from app.results.rows import ResultRow, SubmittedRequest


def erased(row: ResultRow | SubmittedRequest) -> ErasedError:
    return ErasedError(
        f"Result {row.id} was sent with `store` false: its texts were erased at "
        f"{row.erased_at:%Y-%m-%dT%H:%M:%SZ}."
    )


def failure_of(row: ResultRow) -> ResultFailedError:
    """The error of a failed result, for a dialect that has no results."""
    assert row.error_code is not None
    assert row.error_message is not None
    return ResultFailedError(
        FailureCode(row.error_code), row.error_message, {"result_id": str(row.id)}
    )
