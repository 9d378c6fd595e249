"""Scores of a data set by the client's map and by the page Bulk: a row is a query and its documents."""

import csv
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from pyarrow import parquet

from app.core.settings import Settings
from llm_api_client import Client, ConfigurationError, Row
from tests.conftest import Service
from tests.integration.api.test_embeddings import pooling, settings
from tests.integration.client.support import blocking, lines, run_killed
from tests.integration.client.test_command_line import run
from tests.integration.support import serve
from tests.integration.ui.visitor import visit

__all__ = ["pooling", "settings"]

# The scripted score is the share of the query's words that a document has.
ROWS: list[dict[str, Any]] = [
    {"id": f"k{number}", "query": "a b", "documents": ["b", "b a", "c"][: 1 + number % 3]}
    for number in range(600)
]
EXPECTED = {row["id"]: [0.5, 1.0, 0.0][: len(row["documents"])] for row in ROWS}
SCORE: dict[str, Any] = {"model": "ranking", "key": "id", "score": {}}


@pytest.fixture
async def one(settings: Settings) -> AsyncIterator[Service]:
    """API and worker in one process, behind a socket."""
    async with serve(settings, with_worker=True) as service:
        yield service


@pytest.mark.trial
async def test_each_row_has_its_scores(
    one: Service, connection: asyncpg.Connection, tmp_path: Path
) -> None:
    out = tmp_path / "scores.jsonl"

    def work(client: Client) -> dict[str, list[float] | None]:
        job = client.map(ROWS, out=out, **SCORE)
        found = {row.key: row.checked().scores for row in job}
        again = client.map(ROWS, out=out, **SCORE)
        assert (again.id, list(again)) == (job.id, [])
        assert {row.key: row.scores for row in client.job(job.id)} == found
        return found

    assert await blocking(one, work) == EXPECTED
    assert {line["key"]: line["scores"] for line in lines(out)} == EXPECTED
    kinds = await connection.fetch("SELECT kind, count(*) FROM results GROUP BY kind")
    assert [tuple(row) for row in kinds] == [("score", len(ROWS))]


@pytest.mark.trial
async def test_prompts_of_scores(one: Service, tmp_path: Path) -> None:
    rows = [{"q": "a b", "d": ["a", "c"], "list": '["a b", "c"]'}]

    def work(client: Client) -> list[list[float] | None]:
        def scores(prompt: Any, **options: Any) -> list[float] | None:
            (row,) = client.map(rows, prompt, model="ranking", score=options)
            return row.checked().scores

        out = tmp_path / "scores.parquet"
        client.map(ROWS[:50], out=out, **SCORE).run()
        columns = parquet.read_table(out).to_pydict()
        assert dict(zip(columns["key"], columns["scores"], strict=True)) == dict(
            list(EXPECTED.items())[:50]
        )
        sent = client.send(
            [{"role": "query", "content": "a"}, {"role": "document", "content": "a"}],
            model="ranking", score={},
        )  # fmt: skip
        return [
            scores({"query": "{q}", "documents": "{d}"}, raw=True),
            scores({"query": "{q}", "documents": "{list}"}),
            scores({"query": "{q}", "documents": "{q} {q}"}),
            scores(lambda row: {"query": row["q"], "documents": ("x", *row["d"])}),
            client.wait(sent).scores,
        ]

    assert await blocking(one, work) == [[5.0, 0.0], [1.0, 0.0], [1.0], [0.0, 0.5, 0.0], [1.0]]


async def test_wrong_rows_and_options(one: Service) -> None:
    rows = [
        {"query": "a", "documents": "a"},
        {"query": "{{fail}}", "documents": ["a", "b"]},
        {"query": "a", "documents": []},
        {"query": "a", "documents": ["a", 5]},
        {"query": "a"},
        {"query": "a", "documents": ["a"] * 1001},
        {"query": "a", "documents": ["a", "{{refuse}}"]},
    ]

    def work(client: Client) -> dict[str, Row[None]]:
        wrong: list[dict[str, Any]] = [
            {"parameters": {"max_tokens": 5}},
            {"embedding": {}},
            {"prompt": "{query}"},
            {"prompt": {"query": "{query}"}},
        ]
        for members in wrong:
            with pytest.raises(ConfigurationError):
                client.map(rows, model="ranking", score={}, **members)
        with pytest.raises(ConfigurationError, match="score="):
            client.map(rows, {"query": "{query}", "documents": "x"}, model="ranking")
        assert list(client.jobs.list()) == []
        (other,) = client.map(rows[:1], model="pooling", score={})
        assert other.error is not None
        assert "embeddings" in other.error.message
        return {row.key: row for row in client.map(rows, model="ranking", score={})}

    found = await blocking(one, work)
    errors = {key: row.error.code if row.error else None for key, row in found.items()}
    assert errors == {
        "row-1": None,
        "row-2": "model_error",
        "row-3": "invalid_row",
        "row-4": "invalid_row",
        "row-5": "invalid_row",
        "row-6": "invalid_request",
        "row-7": "invalid_request",
    }
    assert (found["row-1"].scores, found["row-2"].scores) == ([1.0], None)


PROGRAM = """
import sys
from llm_api_client import Client
texts = (
    {"id": f"k{i}", "query": "a b", "documents": ["{{delay_ms=1}} a", "b c"]}
    for i in range(int(sys.argv[1]))
)
with Client() as client:
    job = client.map(texts, model="ranking", score={}, key="id", out=sys.argv[2], name="scores")
    print(job.run().counts.completed)
"""


@pytest.mark.trial
async def test_a_killed_client_takes_up_its_scores(
    one: Service, connection: asyncpg.Connection, tmp_path: Path
) -> None:
    number, out = 1200, tmp_path / "scores.jsonl"
    answers = await run_killed(one, PROGRAM, number, out, at=(200, 500))
    assert all(line["scores"] == [0.5, 0.5] for line in answers)
    assert await connection.fetchval("SELECT count(*) FROM results") == number


@pytest.mark.trial
async def test_the_command_line_writes_scores(one: Service, tmp_path: Path) -> None:
    cells = [
        row["id"] + ',a b,"' + json.dumps(row["documents"]).replace('"', '""') + '"'
        for row in ROWS[:9]
    ]
    (tmp_path / "rows.csv").write_text("\n".join(["id,query,passages", *cells]) + "\n")
    words = ["map", "rows.csv", "--score", "-k", "id", "-m", "ranking", "--out", "scores.jsonl"]
    status, _, messages = await run(one, tmp_path, *words, "--documents", "{passages}")
    assert status == 0, messages
    written = {line["key"]: line["scores"] for line in lines(tmp_path / "scores.jsonl")}
    assert written == dict(list(EXPECTED.items())[:9])
    for wrong in (("-t", "{query}"), ("--embed",), ("--system", "x")):
        status, _, messages = await run(one, tmp_path, *words, *wrong)
        assert status == 2, messages
    status, _, messages = await run(
        one, tmp_path, "map", "rows.csv", "-m", "x", "--query", "{query}"
    )
    assert status == 2, messages


async def test_the_page_bulk_scores_a_file(settings: Settings) -> None:
    content = "\n".join(json.dumps(row) for row in ROWS[:5]) + '\n{"id": "none", "query": "a"}\n'
    form = {"kind": "score", "prompt": "query", "documents": "documents", "id": "id", "skip": "yes"}
    async with visit(settings) as visitor:
        refused = await visitor.send(content.encode(), "rows.jsonl", model="ranking", **form)
        assert refused.status_code == 422
        assert "A score takes no parameters" in refused.text  # max_tokens
        form |= {"max_tokens": "", "model": "ranking"}
        uploaded = await visitor.upload(content.encode(), "rows.jsonl")
        preview = (await visitor.http.get(uploaded.headers["location"])).text
        assert 'value="score" checked' in preview
        sent = await visitor.send(content.encode(), "rows.jsonl", **form)
        assert sent.status_code == 303, sent.text
        path = sent.headers["location"]
        await visitor.ended(path)
        results = await visitor.results(path)
        outputs = [row["output"] for row in results]
        assert outputs == [0.5, [0.5, 1.0], [0.5, 1.0, 0.0], 0.5, [0.5, 1.0], None]
        assert results[-1]["status"] == "left_out"
        table = (await visitor.http.get(f"{path}/results.csv")).content.decode("utf-8-sig")
        cells = [row["output"] for row in csv.DictReader(io.StringIO(table, newline=""))]
        assert cells == ["0.5", "[0.5,1.0]", "[0.5,1.0,0.0]", "0.5", "[0.5,1.0]", ""]
