"""Errors of the API and of a form's entries."""

from collections.abc import Iterable


class ApiError(Exception):
    """An error response: its status, code and message; `fields` are (name, message).

    Status 502 and code `unreachable`: there was no response.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        fields: Iterable[tuple[str, str]] = (),
        retry_after: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.fields = tuple(fields)
        self.retry_after = retry_after


class SignInError(ApiError):
    """The API does not accept the visitor's token (401)."""


class RefusedError(ApiError):
    """Any other error: a page shows it above the visitor's entries."""


class FormError(RefusedError):
    """Entries that are invalid values of their controls."""

    def __init__(
        self,
        fields: Iterable[tuple[str, str]],
        message: str = "Some of what you entered cannot be sent.",
    ) -> None:
        super().__init__(422, "invalid_form", message, fields)


class EntryError(FormError):
    """One invalid entry: the message stands above the form, and marks the control `name`."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__([(name, message)], message)


class Ignoring:
    """Context manager that suppresses the error of a response with this status."""

    def __init__(self, status: int) -> None:
        self._status = status

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        return isinstance(error, ApiError) and error.status == self._status
