"""Small real indexes for tests, and the results of a straightforward search of their texts."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from app.infini_gram.build_options import BuildOptions
from app.infini_gram.builder import build
from app.infini_gram.declarations import BYTES, Declaration
from app.infini_gram.engine import Engine
from tests.conftest import ROOT

DEMO_TOKENIZER = ROOT / "models" / "demo" / "1" / "tokenizer.json"
TOKENIZERS = (BYTES, str(DEMO_TOKENIZER))


@dataclass(frozen=True)
class BuiltIndex:
    """An index and the token ids of its documents, in order."""

    declaration: Declaration
    engine: Engine
    documents: list[list[int]]

    def positions(self, needle: Sequence[int]) -> list[tuple[int, int]]:
        """The positions of the needle: document and token offset."""
        length = len(needle)
        return [
            (number, start)
            for number, ids in enumerate(self.documents)
            for start in range(len(ids) - length + 1)
            if ids[start : start + length] == list(needle)
        ]


def some_texts(seed: int = 7, documents: int = 120) -> list[str]:
    """Texts of few words, so that much of them repeats; some of them are equal."""
    chooser = random.Random(seed)  # noqa: S311 # no secret
    words = [
        "def",
        "self",
        "return",
        "the",
        "index",
        "Grüße",
        "東京",
        "x1",
        "(",
        ")",
        "\n    ",
        "🙂",
        ".",
    ]
    texts = [
        " ".join(chooser.choices(words, k=chooser.randrange(1, 60))) for _ in range(documents - 4)
    ]
    return [*texts, "a", texts[0], texts[0], "only here: zyzzyva"]


def build_index(
    directory: Path, texts: Sequence[str], tokenizer: str = BYTES, name: str = "small"
) -> BuiltIndex:
    """Build and open one of these texts below `directory`."""
    corpus = directory / f"{name}.jsonl"
    rows = [orjson.dumps({"text": text, "number": number}) for number, text in enumerate(texts)]
    corpus.write_bytes(b"\n".join(rows))
    build(BuildOptions(corpus, directory / name, tokenizer))
    declaration = Declaration(name, directory / name, tokenizer, "of a test")
    engine = Engine(declaration)
    return BuiltIndex(declaration, engine, [engine.tokenizer.encode(text) for text in texts])


def wide_tokenizer(file: Path, first: int = 131_000) -> Path:
    """The demo tokenizer with all ids from `first` on: they need four bytes, and some end in 0xffff."""
    document = orjson.loads(DEMO_TOKENIZER.read_bytes())
    vocabulary = document["model"]["vocab"]
    for token in vocabulary:
        vocabulary[token] += first
    for token in document["added_tokens"]:
        token["id"] += first
    file.write_bytes(orjson.dumps(document))
    return file
