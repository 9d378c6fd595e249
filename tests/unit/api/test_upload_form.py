"""Uploads and their lines are the same however they are cut into pieces."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given, strategies as st

from app.api.openai.upload_form import UploadForm
from app.batches.lines import split_lines
from app.core.errors import InvalidRequestError, MediaTypeError

TYPE = "multipart/form-data; boundary=edge"
CONTENT = b"one\r\n--edg\r\n--\n\x00\xfftwo"
BODY = (
    b'--edge\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--edge\r\ncontent-disposition: form-data; name="file"; filename="a\\b/c.jsonl"\r\n'
    b"Content-Type: application/octet-stream\r\n\r\n" + CONTENT + b"\r\n--edge\r\n"
    b'Content-Disposition: form-data; name="later"\r\n\r\n\xc3\xbc\r\n--edge--\r\n'
)


def pieces_of(content: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = [0, *sorted({cut % (len(content) + 1) for cut in cuts}), len(content)]
    return [content[start:end] for start, end in itertools.pairwise(places)]


@given(st.lists(st.integers(min_value=0), max_size=30))
def test_a_form_in_pieces(cuts: list[int]) -> None:
    form = UploadForm(TYPE)
    content = b"".join(form.feed(piece) for piece in pieces_of(BODY, cuts))
    form.close()
    assert content == CONTENT
    assert form.filename == "c.jsonl"
    assert form.fields == {"purpose": "batch", "later": "ü"}


@pytest.mark.parametrize(
    "body",
    [
        BODY[:-9],
        BODY.replace(b'"later"', b'"file"; filename="again"'),
        b'--edge\r\nContent-Disposition: form-data; name="x"\r\n\r\n' + b"y" * 5_000,
        b"".join(
            b'--edge\r\nContent-Disposition: form-data; name="%d"\r\n\r\n\r\n' % n
            for n in range(40)
        ),
        b"edge",
        b"",
    ],
)
def test_what_is_no_form_of_ours(body: bytes) -> None:
    form = UploadForm(TYPE)
    with pytest.raises(InvalidRequestError):
        _read(form, body)


def _read(form: UploadForm, body: bytes) -> None:
    form.feed(body)
    form.close()


@pytest.mark.parametrize(
    "content_type",
    ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=edge"],
)
def test_other_media_types(content_type: str) -> None:
    with pytest.raises(MediaTypeError):
        UploadForm(content_type)


async def lines_of(parts: Sequence[bytes], max_bytes: int) -> list[bytes | None]:
    async def read() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return [line async for line in split_lines(read(), max_bytes)]


@given(
    st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"")), max_size=12),
    st.lists(st.integers(min_value=0), max_size=12),
)
async def test_lines_in_pieces(lines: list[bytes], cuts: list[int]) -> None:
    content = b"\n".join(lines)
    whole = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    expected = [line if len(line) <= 8 else None for line in whole]
    if expected[-1] == b"":
        expected.pop()  # nothing behind the last line's end
    first, *rest = pieces_of(content, cuts)
    # The mark of UTF-8 is looked for in the first part alone, which is never so short.
    parts = [first, *rest] if len(first) >= 3 else [content]
    assert await lines_of(parts, 8) == expected


async def test_splitting_many_lines_lets_others_run() -> None:
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(take_turns())
    assert await lines_of([b"\n" * 100_000], 8) == [b""] * 100_000
    other.cancel()
    assert turns >= 40
