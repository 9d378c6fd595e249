"""Vectors of a data set by the client's map: each row once, across interruptions, in files and in order."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from pyarrow import parquet

from app.core.settings import Settings
from llm_api_client import AsyncClient, Client, ConfigurationError, Row
from tests.conftest import Service
from tests.integration.api.test_embeddings import embed, pooling, settings
from tests.integration.client.support import blocking, lines, run_killed, url_of
from tests.integration.client.test_command_line import run
from tests.integration.support import serve

__all__ = ["pooling", "settings"]

ROWS = [{"id": f"k{number}", "text": f"text {number}"} for number in range(1500)]
EMBED: dict[str, Any] = {"model": "pooling", "key": "id", "embedding": {}}


@pytest.fixture
async def one(settings: Settings) -> AsyncIterator[Service]:
    """API and worker in one process, behind a socket."""
    async with serve(settings, with_worker=True) as service:
        yield service


async def vector_of(service: Service, text: str, **members: Any) -> list[float]:
    """The vector by OpenAI's dialect."""
    vector: list[float] = (await embed(service, text, **members))["data"][0]["embedding"]
    return vector


@pytest.mark.trial
async def test_each_row_has_its_vector(
    one: Service, connection: asyncpg.Connection, tmp_path: Path
) -> None:
    out = tmp_path / "vectors.jsonl"

    def work(client: Client) -> dict[str, Row[None]]:
        job = client.map(ROWS, "{text}", out=out, **EMBED)
        found = {row.key: row.checked() for row in job}
        again = client.map(ROWS, "{text}", out=out, **EMBED)
        assert again.id == job.id
        assert list(again) == []
        info = job.info()
        assert (info.state, info.counts.completed) == ("ended", 1500)
        assert info.usage.prompt_tokens == 3000  # two of each text
        read_later = {row.key: row.vector for row in client.job(job.id)}
        assert read_later == {key: row.vector for key, row in found.items()}
        return found

    found = await blocking(one, work)
    assert found.keys() == {row["id"] for row in ROWS}
    assert await connection.fetchval("SELECT count(*) FROM results") == 1500
    for row in ROWS[::300]:
        mapped = found[row["id"]]
        assert mapped.vector == await vector_of(one, row["text"])
        assert (mapped.text, mapped.value) == ("", None)
    written = {line["key"]: line for line in lines(out)}
    assert {key: line["vector"] for key, line in written.items()} == {
        key: row.vector for key, row in found.items()
    }
    kinds = await connection.fetch("SELECT DISTINCT kind FROM results")
    assert [row["kind"] for row in kinds] == ["embedding"]


@pytest.mark.trial
async def test_options_and_the_order_of_the_data(one: Service) -> None:
    texts = [row["text"] for row in ROWS[:300]]
    options = {"dimensions": 4, "normalize": False}
    async with AsyncClient(url_of(one)) as client:
        job = await client.map(
            iter(texts), model="pooling", embedding=options, order="input", window=100
        )
        mapped = [row async for row in job]
        sent = await client.send(texts[0], model="pooling", embedding=options)
        alone = (await client.wait(sent)).checked()
        listed = [row.vector async for row in await client.job(job.id)]
    assert [row.input for row in mapped] == texts
    assert [len(row.vector or ()) for row in mapped] == [4] * 300
    assert mapped[0].vector == await vector_of(one, texts[0], **options)
    assert (alone.kind, alone.vector, alone.text) == ("embedding", mapped[0].vector, "")
    assert sorted(listed, key=str) == sorted((row.vector for row in mapped), key=str)


@pytest.mark.trial
async def test_wrong_rows_and_options(one: Service) -> None:
    rows = ["good", "{{refuse}}", 5, "x\x00"]

    def work(client: Client) -> dict[str, Row[None]]:
        for wrong in ({"parameters": {"max_tokens": 5}}, {"structured": dict[str, str]}):
            with pytest.raises(ConfigurationError, match="embedding="):
                client.map(["x"], model="pooling", embedding={}, **wrong)
        assert list(client.jobs.list()) == []
        (refused,) = client.map(["x"], model="pooling", embedding={"dimensions": 0})
        assert refused.error is not None
        assert "dimensions" in refused.error.message
        (generating,) = client.map(["x"], model="scripted", embedding={})
        assert generating.error is not None
        return {row.key: row for row in client.map(rows, model="pooling", embedding={})}

    found = await blocking(one, work)
    errors = {key: row.error.code if row.error else None for key, row in found.items()}
    assert errors == {
        "row-1": None,
        "row-2": "invalid_request",
        "row-3": "invalid_row",
        "row-4": "invalid_request",
    }
    assert found["row-1"].vector
    assert found["row-2"].vector is None


@pytest.mark.trial  # two data sets, and pyarrow's files of both
async def test_a_parquet_file_has_a_column_of_vectors(one: Service, tmp_path: Path) -> None:
    out = tmp_path / "vectors.parquet"

    def work(client: Client) -> dict[str, list[float] | None]:
        job = client.map(ROWS[:50], "{text}", out=out, **EMBED)
        vectors = {row.key: row.vector for row in job}
        client.map(["{{chunks=1}}"], model="scripted", out=tmp_path / "texts.parquet").run()
        return vectors

    vectors = await blocking(one, work)
    table = parquet.read_table(out)
    assert str(table.schema.field("vector").type) == "list<element: float>"
    columns = table.to_pydict()
    assert dict(zip(columns["key"], columns["vector"], strict=True)) == vectors
    assert "vector" not in parquet.read_table(tmp_path / "texts.parquet").column_names


PROGRAM = """
import sys
from llm_api_client import Client
texts = ({"id": f"k{i}", "text": f"{{{{delay_ms=1}}}} text {i}"} for i in range(int(sys.argv[1])))
with Client() as client:
    job = client.map(
        texts, "{text}", model="pooling", embedding={}, key="id", out=sys.argv[2], name="vectors"
    )
    print(job.run().counts.completed)
"""


@pytest.mark.trial
async def test_a_killed_client_takes_up_its_vectors(
    one: Service, connection: asyncpg.Connection, tmp_path: Path
) -> None:
    number, out = 4000, tmp_path / "vectors.jsonl"
    answers = await run_killed(one, PROGRAM, number, out, at=(500, 1000))
    assert {len(line["vector"]) for line in answers} == {8}
    assert await connection.fetchval("SELECT count(*) FROM results") == number


async def test_the_command_line_writes_vectors(one: Service, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("id,text\n" + "".join(f"k{i},text {i}\n" for i in range(20)))
    words = ["map", "rows.csv", "-t", "{text}", "-k", "id", "-m", "pooling", "--embed"]
    status, _, messages = await run(
        one, tmp_path, *words, "-p", "dimensions=4", "--out", "vectors.jsonl"
    )
    assert status == 0, messages
    written = {line["key"]: line["vector"] for line in lines(tmp_path / "vectors.jsonl")}
    assert len(written) == 20
    assert written["k3"] == await vector_of(one, "text 3", dimensions=4)
