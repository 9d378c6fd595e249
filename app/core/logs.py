"""Log format: text lines for people or JSON lines, with the ids of request, result and worker.

Prompts and generated texts are logged only with `LLM_LOG_CONTENT`; quotes of them in the database's
errors are removed too.
"""

import logging
import traceback
from datetime import UTC, datetime
from typing import Any

import orjson
from pydantic import ValidationError

from app.core import log_context
from app.core.json_lines import on_one_line
from app.core.settings.observability import LogSettings

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_IDS = ("request_id", "result_id", "worker_id", "attempt", "team_id")
_MAX_CHARACTERS = 10_000  # of a prompt or a generated text
_MAX_FRAMES = 50
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127, 0x85, 0x2028, 0x2029)}

_shows_content = False


def configure(settings: LogSettings) -> None:
    global _shows_content
    _shows_content = settings.content
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if settings.format == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # Only our own loggers: debug lines of libraries contain headers.
    logging.getLogger("app").setLevel(settings.level.upper())
    if settings.level in ("warning", "error"):
        logging.getLogger().setLevel(settings.level.upper())
    # It logs the URL of each request, and a webhook's URL may hold a token.
    logging.getLogger("httpx").setLevel(logging.WARNING)


def shows_content() -> bool:
    return _shows_content


def cut(text: str) -> str:
    """Shorten a prompt or a generated text to what a log line holds."""
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


def members(record: logging.LogRecord) -> dict[str, Any]:
    found = dict(log_context.ids())
    found.update((name, value) for name, value in vars(record).items() if name not in _OWN)
    return found


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **members(record),
        }
        if record.exc_info and record.exc_info[1]:
            line["exception"] = describe(record.exc_info[1])
        text = orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS)
        return on_one_line(text).replace(b"\x7f", b"\\u007f").decode()


class TextFormatter(logging.Formatter):
    """Text line; the ids come last, a traceback follows."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage().translate(_CONTROL)
        record.asctime = self.formatTime(record)
        line = self.formatMessage(record)
        found = members(record)
        names = [name for name in _IDS if str(found.get(name, "")) not in record.message]
        if _shows_content:
            names += [name for name in ("prompt", "output") if name in found]
        ids = " ".join(f"{name}={found[name]}".translate(_CONTROL) for name in names)
        if ids:
            line += f" [{ids}]"
        if record.exc_info and record.exc_info[1]:
            line += f"\n{describe(record.exc_info[1])}"
        return line


def describe(error: BaseException) -> str:
    """Format the traceback of an error and its causes, without quoted texts of clients."""
    parts = []
    if error.__cause__ is not None:
        parts += [describe(error.__cause__), "The error above was the direct cause of this one:"]
    elif error.__context__ is not None and not error.__suppress_context__:
        parts += [describe(error.__context__), "While that was handled, this one occurred:"]
    message = _message(error).translate(_CONTROL)
    frames = "".join(traceback.format_tb(error.__traceback__, -_MAX_FRAMES))
    parts.append(f"{frames}{type(error).__module__}.{type(error).__qualname__}: {message}")
    if isinstance(error, BaseExceptionGroup):
        parts += [describe(one) for one in error.exceptions]
    return "\n".join(parts)


def _message(error: BaseException) -> str:
    if _shows_content:
        return str(error)
    import asyncpg  # here: commands that need no database stay small

    if isinstance(error, asyncpg.PostgresError):  # its details quote rows
        message = str(error.args[0]) if error.args else ""
        return f"{message.partition(':')[0]} (SQLSTATE {error.sqlstate})"
    if isinstance(error, asyncpg.InterfaceError):  # so do these, behind a colon
        return str(error).partition(":")[0]
    if isinstance(error, ValidationError):
        return f"{error.error_count()} errors in {error.title}"
    return str(error)
