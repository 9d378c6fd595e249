"""The parts of T1 to T3 that compute: windows of CPU time, event streams in pieces, lags."""

import asyncio

import orjson
import pytest

from bench import __main__ as command
from bench.report import medians
from bench.sse_readers import Piece, to_stream
from bench.streams import PARAMETERS, Stream
from bench.t2_engine_rate import prompts_of
from bench.t3_token_lag import lags_of
from bench.token_load import TokenLoad
from bench.windows import Reading, cut, record

SECOND = 1_000_000_000
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def tokens_at(began: float, ended: float) -> list[int]:
    """Sending times of 10 tokens a second."""
    count = round((ended - began) * 10) + 1
    return [round((began + number / 10) * SECOND) for number in range(count)]


def readings_at(*seconds: float) -> list[Reading]:
    """A worker that uses a quarter of a core."""
    return [Reading(round(at * SECOND), {"worker": at / 4}) for at in seconds]


def test_a_window_reaches_from_the_last_begin_to_the_first_end() -> None:
    streams = [tokens_at(1, 6), tokens_at(1.95, 7), tokens_at(0, 5.05)]
    window = cut(readings_at(*range(9)), streams, {"worker": 0.05, "another": 1})
    assert (window.began, window.ended) == (2 * SECOND, 5 * SECOND)
    assert window.tokens == 3 * 3 * 10
    assert window.rate == 30
    assert window.cpu == {"worker": pytest.approx(3 * 0.2)}
    assert window.microseconds("worker") == pytest.approx(0.6 / 90 * 1e6)


@pytest.mark.parametrize("readings", [readings_at(0, 3, 9), readings_at(0, 9), []])
def test_streams_that_did_not_run_together_for_long_have_no_window(
    readings: list[Reading],
) -> None:
    with pytest.raises(RuntimeError, match=r"for 4\.0 s only"):
        cut(readings, [tokens_at(1, 6), tokens_at(2, 7)], {})


async def test_a_load_whose_process_has_just_ended_has_its_result() -> None:
    above_all_ids = 2**22 + 1  # of processes, in Linux
    assert await record({"client": above_all_ids}, asyncio.sleep(0, "done")) == ("done", [])


def event(name: str, data: object) -> bytes:
    frame = b"event: %b\nid: 1:2\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))
    return b"%x\r\n%b\r\n" % (len(frame), frame)


def body_of(*texts: str, state: str = "completed") -> bytes:
    deltas = b"".join(event("delta", {"text": text, "offset": 7}) for text in texts)
    end = event(state, {"state": state, "result": "".join(texts)})
    return HEAD + event("attempt", {"attempt": 1}) + deltas + end + b"0\r\n\r\n"


def pieces_of(body: bytes, size: int) -> list[Piece]:
    """Pieces of so many bytes; each arrives at the time that is the place of its end."""
    return [(min(at + size, len(body)), body[at : at + size]) for at in range(0, len(body), size)]


@pytest.mark.parametrize("size", [1, 2, 61, 5_000])
def test_a_token_arrives_with_the_event_that_completes_it(size: int) -> None:
    first, second = event("delta", {"text": "11 22 3"}), event("delta", {"text": "3 44 "})
    end = event("completed", {"state": "completed", "result": "11 22 33 44 "})
    body = HEAD + first + second + end + b"0\r\n\r\n"
    # The line of data ends before an empty line and the chunk's end.
    lines = [len(HEAD + first) - 3, len(HEAD + first + second) - 3]
    rounded = [min(len(body), -(-line // size) * size) for line in lines]
    stream = to_stream(5, pieces_of(body, size), has_clock=True)
    assert stream.made == [11, 22, 33, 44]
    assert stream.seen == [rounded[0]] * 2 + [rounded[1]] * 2
    assert (stream.began, stream.ended) == (5, len(body))
    assert stream.result["state"] == "completed"


def test_words_are_no_times_where_there_is_no_clock() -> None:
    stream = to_stream(0, pieces_of(body_of("some words"), 100), has_clock=False)
    assert stream.result["result"] == "some words"
    assert not stream.made


def test_a_stream_that_fails_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="not completed"):
        to_stream(0, pieces_of(body_of("1 2", state="failed"), 100), has_clock=True)


def test_lags_are_those_of_tokens_made_in_the_window() -> None:
    made = [number * SECOND for number in range(10)]
    seen = [at + (number + 1) * 1_000_000 for number, at in enumerate(made)]
    lags = lags_of([Stream(0, made=made, seen=seen)], 2 * SECOND, 7 * SECOND)
    assert (lags.median, lags.p99, lags.longest) == (5, 7, 7)  # 3 to 7 ms
    assert lags.rate == 1


def test_a_load_keeps_within_the_tokens_of_a_result() -> None:
    short, long = TokenLoad(64, 1), TokenLoad(64, 60)
    assert short.tokens == 4 * 50
    assert long.tokens == PARAMETERS["max_tokens"]
    assert f"clock chunks={short.tokens} " in short.prompt
    assert short.nominal_rate == 3_200


def test_no_prompt_is_one_of_another_part() -> None:
    prompts = prompts_of(64, "0.1") + prompts_of(128, "0.1") + prompts_of(64, "1.1")
    assert len(set(prompts)) == 256


def test_medians_leave_empty_columns_empty() -> None:
    assert medians([[1, None, 5], [3, None, None]]) == [2, None, 5]


def test_help_of_the_benchmarks_lists_every_goal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--help"])
    with pytest.raises(SystemExit, match="0"):
        command.main()
    text = capsys.readouterr().out
    for goal, (_, meaning) in command._GOALS.items():
        assert f"  {goal}  {meaning}" in text
