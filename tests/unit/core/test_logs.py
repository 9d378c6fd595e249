"""Lines of the log: their members, and the texts that must not be in them."""

import logging

import asyncpg
import orjson
import pytest

from app.auth.principal import ANYONE
from app.core import logs
from app.core.log_context import CURRENT
from app.core.logs import JsonFormatter, TextFormatter
from app.core.settings.observability import LogSettings

TEXT = "a user's text"


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    logger = logging.getLogger("app.test")
    return logger.makeRecord(
        logger.name, logging.INFO, "file", 1, message, arguments, None, None, extra
    )


def broken(error: BaseException) -> logging.LogRecord:
    found = record("it broke")
    try:
        try:
            raise ValueError("before")
        except ValueError as cause:
            raise error from cause
    except BaseException as raised:  # noqa: BLE001 - any error
        found.exc_info = (type(raised), raised, raised.__traceback__)
    return found


def refused_row() -> asyncpg.PostgresError:
    error = asyncpg.CheckViolationError("new row violates a constraint")
    error.detail = f"Failing row contains ({TEXT})."
    return error


def test_a_json_line_holds_message_and_ids() -> None:
    found = record("result %s ended", "r1", result_id="r1", attempt=2, seconds=0.5)
    line = orjson.loads(JsonFormatter().format(found))
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "app.test",
        "message": "result r1 ended",
        "result_id": "r1",
        "attempt": 2,
        "seconds": 0.5,
    }


def test_the_present_request_is_named() -> None:
    token = CURRENT.set({"request_id": "q1", "principal": ANYONE})
    try:
        line = orjson.loads(JsonFormatter().format(record("x")))
        assert (line["request_id"], line["team_id"]) == ("q1", ANYONE.team_id)
        other = orjson.loads(JsonFormatter().format(record("x", request_id="q2")))
        assert other["request_id"] == "q2"  # the record's own
        assert (
            TextFormatter()
            .format(record("x"))
            .endswith(f": x [request_id=q1 team_id={ANYONE.team_id}]")
        )
    finally:
        CURRENT.reset(token)


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_no_text_divides_a_line(formatter: logging.Formatter) -> None:
    hostile = "x\n2026-01-01 ERROR app: forged\r\x1b[2J\u2028"
    line = formatter.format(record("text %s", hostile, result_id=hostile))
    assert len(line.splitlines()) == 1
    assert "\x1b" not in line
    traced = formatter.format(broken(RuntimeError(hostile)))
    assert not [one for one in traced.splitlines() if one.startswith("2026-01-01 ERROR")]


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
@pytest.mark.parametrize(
    "error",
    [
        refused_row(),
        asyncpg.DataError(f"invalid input for query argument $1: {TEXT!r} (not a number)"),
        asyncpg.InterfaceError(f"invalid input for query argument $1: {TEXT!r}"),
        ExceptionGroup("several", [refused_row()]),
    ],
)
def test_errors_quote_no_user(formatter: logging.Formatter, error: Exception) -> None:
    line = formatter.format(broken(error))
    assert TEXT not in line
    assert type(error).__name__ in line
    assert "ValueError: before" in line
    assert "test_logs.py" in line


def test_what_no_json_can_hold_is_written_somehow() -> None:
    line = orjson.loads(JsonFormatter().format(record("x", value=object(), number={1: 2})))
    assert line["value"].startswith("<object")


def test_settings_choose(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogSettings(format="json", level="debug", content=True))
    assert logs.shows_content()
    logging.getLogger("app.x").debug("ours")
    logging.getLogger("elsewhere").debug("theirs")
    logging.getLogger("uvicorn.error").info("started")
    logging.getLogger("httpx").info("GET https://example.org/?token=x")
    lines = [orjson.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == ["ours", "started"]

    logs.configure(LogSettings(level="warning"))
    assert not logs.shows_content()
    logging.getLogger("app.x").info("ours")
    logging.getLogger("uvicorn.error").info("started")
    logging.getLogger("app.x").warning("received")
    assert capsys.readouterr().err.endswith(" WARNING app.x: received\n")


def test_long_texts_are_cut() -> None:
    assert logs.cut("short") == "short"
    assert len(logs.cut("x" * 1_000_000)) < 10_010
