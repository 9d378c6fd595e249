"""A transcript gives back any part of what was put in."""

from hypothesis import given, strategies as st

from app.transcript import Transcript


@given(st.lists(st.text(max_size=6)), st.integers(0, 60), st.none() | st.integers(1, 20))
def test_reads_as_one_text(pieces: list[str], offset: int, limit: int | None) -> None:
    transcript, whole = Transcript(), "".join(pieces)
    for piece in pieces:
        transcript.append(piece)
    assert str(transcript) == whole
    assert len(transcript) == len(whole)
    end = None if limit is None else offset + limit
    assert transcript.since(offset, limit) == whole[offset:end]
