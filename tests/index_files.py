"""Indexes written by hand: small ones, by the plainest code that makes their files.

The layout is the package's (infini-gram, version 4): for each shard the tokens with a separator
before each document, the suffix array over their bytes, and where documents and metadata begin.
"""

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from app.infini_gram.declarations import WIDTH
from app.infini_gram.manifest import FORMAT, KINDS, Manifest, entry_of
from app.infini_gram.tokenizer import Tokenizer


@dataclass
class Text:
    """A document of a corpus: its tokens, and what is kept beside them."""

    ids: list[int]
    metadata: dict[str, Any] = field(default_factory=dict)


Shard = list[Text]


def shard_of(tokenizer: Tokenizer, texts: Sequence[str], name: str) -> Shard:
    # Attribution ignores the first suffix of a shard: this one is no part of any text.
    first = Text([0] * 100)
    return [
        first,
        *(
            Text(tokenizer.encode(text), {"of": f"{name}.{number}"})
            for number, text in enumerate(texts)
        ),
    ]


def write_index(directory: Path, shards: Sequence[Shard], tokenizer: Tokenizer) -> None:
    """The files of an index, and its manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    width = WIDTH[tokenizer.dtype]
    tokens = 0
    for number, shard in enumerate(shards):
        stream = stream_of(shard, width)
        tokens += len(stream) // width
        pointer_width = (len(stream).bit_length() + 7) // 8
        table = b"".join(one.to_bytes(pointer_width, "little") for one in suffixes(stream, width))
        metadata = [orjson.dumps(text.metadata) + b"\n" for text in shard]
        counts = Counter(stream[n : n + width] for n in range(0, len(stream), width))
        unigrams = (
            [f"{counts[bytes([n])]}\n" for n in range(256)]
            if width == 1
            else [f"{int.from_bytes(one, 'little')} {n}\n" for one, n in counts.items()]
        )
        contents = {
            "tokenized": stream,
            "table": table,
            "offset": _offsets([width * (len(text.ids) + 1) for text in shard]),
            "metadata": b"".join(metadata),
            "metaoff": _offsets([len(line) for line in metadata]),
            "unigram": "".join(unigrams).encode(),
        }
        for kind, content in contents.items():
            (directory / f"{kind}.{number}").write_bytes(content)
    names = [f"{kind}.{number}" for kind in KINDS for number in range(len(shards))]
    Manifest(
        format=FORMAT,
        token_dtype=tokenizer.dtype,
        vocab_size=tokenizer.vocab_size,
        end_id=tokenizer.end_id,
        tokenizer_sha256=tokenizer.sha256,
        shards=len(shards),
        tokens=tokens,
        documents=sum(len(shard) for shard in shards),
        files={name: entry_of(directory / name) for name in names},
    ).write(directory)


def stream_of(shard: Shard, width: int) -> bytes:
    """The tokens of a shard as they are on disk."""
    return b"".join(
        b"\xff" * width + b"".join(one.to_bytes(width, "little") for one in text.ids)
        for text in shard
    )


def suffixes(stream: bytes, width: int) -> list[int]:
    """The start positions of the suffixes, in the order of their bytes."""
    return sorted(range(0, len(stream), width), key=lambda start: stream[start:])


def _offsets(lengths: list[int]) -> bytes:
    return b"".join(struct.pack("<Q", sum(lengths[:n])) for n in range(len(lengths)))
