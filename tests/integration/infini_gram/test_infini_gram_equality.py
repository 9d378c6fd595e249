"""A thousand random requests of every type, answered as the package infini-gram answers them.

Over 2 MB of made-up text, as bytes and as tokens; `python -m bench ngram` does the same over 50 MB.
"""

from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.core.settings import Settings
from app.infini_gram.attribution import AttributionRequest, attribute
from app.infini_gram.build_options import BuildOptions
from app.infini_gram.builder import build
from bench.corpus import texts, train_tokenizer, write_corpus
from bench.index_questions import KINDS, Asker, Bare, ByteWords, FileWords, Speaks
from tests.conftest import Service, run_service

QUESTIONS = 1000
SEED = 17


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus, its tokenizer, both indexes and their declaration."""
    directory = tmp_path_factory.mktemp("indexes")
    write_corpus(directory / "corpus.jsonl", 2_000_000, SEED)
    train_tokenizer(directory / "tokenizer.json", SEED, 300)
    declared = ""
    for name, tokenizer in (("bytes", "bytes"), ("words", str(directory / "tokenizer.json"))):
        build(BuildOptions(directory / "corpus.jsonl", directory / name, tokenizer))
        declared += f'[indexes.{name}]\npath = "{name}"\ntokenizer = "{tokenizer}"\n'
    (directory / "indexes.toml").write_text(declared)
    return directory


@pytest.fixture
async def indexed(settings: Settings, directory: Path) -> AsyncIterator[Service]:
    changed = settings.model_copy(update={"indexes_file": directory / "indexes.toml"})
    async with run_service(changed, with_worker=False) as service:
        yield service


async def ask(service: Service, name: str, kind: str, body: Any) -> Any:
    if kind == "attribution":  # its route is another part's: it needs a worker
        request = AttributionRequest.model_validate(body)
        engine = service.services.indexes.engine(name)
        return orjson.loads(orjson.dumps(attribute(engine, request, request.response)))
    if kind == "documents":
        answer = await service.client.get(f"/{name}/documents/", params=body)
    else:
        answer = await service.client.post(f"/{name}/{kind}", json=body)
    assert answer.status_code == 200, (kind, body, answer.text)
    return answer.json()


@pytest.mark.parametrize("name", ["bytes", "words"])
@pytest.mark.trial
async def test_the_same_as_the_package(indexed: Service, directory: Path, name: str) -> None:
    engine = indexed.services.indexes.engine(name)
    words: Speaks = ByteWords() if name == "bytes" else FileWords(directory / "tokenizer.json")
    bare = Bare(directory / name, engine.token_dtype, engine.end_id, engine.vocab_size, words)
    sample = list(islice(texts(SEED), 500))
    asker = Asker(bare, words, sample, engine.vocab_size, SEED)
    asked = 0
    while asked < QUESTIONS:
        for kind in KINDS:
            body = asker.body(kind)
            assert await ask(indexed, name, kind, body) == bare.answer(kind, body), (kind, body)
            asked += 1
