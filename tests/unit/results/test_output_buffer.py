"""A transcript gives back any part of what was put in."""

import orjson
from hypothesis import given, strategies as st

from app.queue.progress import json_list
from app.results.streams.output_buffer import OutputBuffer, TokenLog


@given(st.lists(st.text(max_size=6)), st.integers(0, 60), st.none() | st.integers(1, 20))
def test_reads_as_one_text(pieces: list[str], offset: int, limit: int | None) -> None:
    transcript, whole = OutputBuffer(), "".join(pieces)
    for piece in pieces:
        transcript.append(piece)
    assert str(transcript) == whole
    assert len(transcript) == len(whole)
    end = None if limit is None else offset + limit
    assert transcript.since(offset, limit) == whole[offset:end]


def test_the_chosen_token_is_marked_where_others_stand_beside_it() -> None:
    """The database does not keep the order of the members, which would show it."""
    log = TokenLog()
    alone, crowded = {"7": {"logprob": -1}}, {"9": {"logprob": -2}, "8": {"logprob": -1}}
    log.append(orjson.dumps([alone]).decode())
    log.append(orjson.dumps([crowded, alone]).decode())
    marked = {"9": {"logprob": -2, "sampled": True}, "8": {"logprob": -1}}
    assert log.since(0) == [alone, marked, alone]
    assert log.since(0, 1) == [alone]
    assert log.since(1, 1) == log.since(1) == [marked, alone]
    assert orjson.loads(json_list(log.parts()) or "") == [alone, marked, alone]
    assert log.parts(1) == (orjson.dumps(marked) + b"," + orjson.dumps(alone),)
    assert json_list(log.parts(3)) is None
