"""Words of results: found behind the totals, in a time that is linear in the text, and without it if need be."""

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import asyncpg
import pytest

from app.core import metrics
from app.core.database import Database
from app.core.settings import Settings
from app.queue.depth import QueueDepth
from app.results import indexer as results_indexer, word_indexer
from app.results.indexer import ResultIndexer
from app.results.search_words import RUN, words_sql
from app.results.word_indexer import pieces_in_turns
from tests.integration.results.test_indexer import COUNTED, add, found

PARSE = f"SELECT length({words_sql('$1::text', '100000')})"
LONG = "text" + " more" * 500
MAX_RATIO = 9.0  # for 4 times the text: linear work takes 4 times as long, quadratic work 16 times

# Each is repeated. PostgreSQL's parser looks ahead in most of them; `<` looks beyond spaces.
KINDS = [
    "a_", "snake_case_", "1_", "0x_", "a_a-", "a-", "hyphen-ated", "a-a.", "a.b_", "a.", "1.", "./", "/.",
    "../", "~/", "~.", "a@", "a@b-", "a@a.", "http://a_", "https://a.bc/d?e=f&", "a:", "&", "&amp", "&#1",
    "<", "<a", '<a b="', "<a '\">", "<!--", "<!-- >", "<!-->", "-->", "_!;", "<#a;", "1e-", "+1", "a/",
    "%20", "a=", "é_", "x", "word ",
]  # fmt: skip

ORDINARY = [
    "It's well-known: state-of-the-art models, e.g. gpt-4o-mini, are up-to-date.",
    "snake_case and a_much_longer_snake_case_identifier_of_python, self._private, __init__",
    "https://example.com/a/path_of/file.html?query=1&other=two#part (http://user@host.org:8080/x)",
    "mail someone.else@mail.example.org or root@localhost; see www.example.org, example.org/page",
    "-12 +3.5 1e-9 6.02e23 0x1f 1,000,000 2026-11-28T12:00:00Z v1.2.3-rc1 192.168.0.1:8000 10.0.0.0/8",
    "/usr/local/lib_x/y.so ~/.config/app.toml ./run.sh ../up C:\\dir\\file.txt a/b/c",
    '<p class="x">text <b>bold</b> <!-- a remark --> if a < b and b > c: x <- y, a<b</p> &amp; &lt; &#228;',
    "```python\nfor i in range(3):\n    total += rows[i]['a_b'] ** 2  # note\n``` | a | b |\n|---|---|",
    "Grüße aus Köln: naïve café, Straße; 漢字とかな、テスト。 emoji 😀👍 e\u0301 \u200d zero",
    "x" * 3000 + " " + "QUJD+/" * 400 + "== end",
]  # fmt: skip


@pytest.fixture
async def database(settings: Settings) -> AsyncIterator[Database]:
    async with Database(settings, "test") as database:
        yield database


@pytest.fixture
def indexer(database: Database, settings: Settings) -> ResultIndexer:
    return ResultIndexer(database, QueueDepth(database, settings), settings)


async def seconds(connection: asyncpg.Connection, text: str) -> float:
    began = time.perf_counter()
    await connection.fetchval(PARSE, text)
    return time.perf_counter() - began


async def test_the_time_of_the_parser_grows_with_the_text_and_not_with_its_square(
    connection: asyncpg.Connection,
) -> None:
    for kind in KINDS:
        text = (kind * 6_000)[:6_000]
        small = large = 1e9
        for _ in range(200):  # until the machine disturbs neither
            small = min(small, await seconds(connection, text[:1_500]))
            large = min(large, await seconds(connection, text))
            if large < MAX_RATIO * small:
                break
        assert large < MAX_RATIO * small, kind


async def test_ordinary_texts_have_the_words_that_they_always_had(
    connection: asyncpg.Connection,
) -> None:
    texts = [*ORDINARY, Path(word_indexer.__file__).read_text(encoding="utf-8")]
    for text in texts:
        assert await connection.fetchval(
            f"SELECT {words_sql('$1::text', '100000')} = to_tsvector('simple', $1::text)", text
        ), text


@pytest.mark.parametrize(
    ("text", "queries"),
    [
        ("an_unusually_long_name_" * 20 + "of_a_row", ["unusually", "unusually_long_name", "of_a_row"]),
        (f"https://host.example.com/{'part/' * 12}?{'key=value&' * 12}last=1", ["host.example.com"]),
        ("<!-- begun " * 300 + "and never closed", ["begun", "closed"]),
    ],
)  # fmt: skip
async def test_a_long_run_is_found_by_its_parts(
    connection: asyncpg.Connection, indexer: ResultIndexer, text: str, queries: list[str]
) -> None:
    assert len(text) > RUN
    (one,) = await add(connection, output=text)
    await indexer.index()
    for query in queries:
        assert await found(connection, query) == [one], query


async def test_a_text_that_cannot_be_parsed_stops_no_other_and_no_total(
    settings: Settings, connection: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """A parser in PostgreSQL's place gives up on some texts, on one of them only if it is long."""
    await connection.execute(
        f"ALTER DATABASE {settings.database_name} SET search_path = failing, pg_catalog, public"
    )
    await connection.execute("""
        CREATE SCHEMA failing;
        CREATE FUNCTION failing.to_tsvector(regconfig, text) RETURNS tsvector IMMUTABLE LANGUAGE plpgsql AS '
        BEGIN
          IF $2 ~ ''slow'' OR $2 ~ ''long'' AND length($2) > 50000 THEN
            RAISE query_canceled;
          END IF;
          RETURN pg_catalog.to_tsvector($1, $2);
        END'""")
    await add(connection, team="other", output="text")
    (slow,) = await add(connection, output="slow text")
    (long,) = await add(connection, output="long text" + " more" * 20_000)
    await add(connection, team="other", output="text")
    before = metrics.WITHOUT_WORDS.value
    async with Database(settings, "test") as database:
        indexer = ResultIndexer(database, QueueDepth(database, settings), settings)
        assert not await indexer.index()
    assert await connection.fetchval(COUNTED) == 4
    assert len(await found(connection, "text")) == 3
    assert await found(connection, "long") == [long]
    assert await connection.fetchval(
        "SELECT words IS NULL FROM result_search WHERE result_id = $1", slow
    )
    assert await connection.fetchval("SELECT count(*) FROM undigested_results") == 0
    assert metrics.WITHOUT_WORDS.value == before + 1
    logged = [one for one in caplog.records if getattr(one, "action", "") == "without_words"]
    assert [getattr(one, "result_id", "") for one in logged] == [str(slow)]


async def test_long_texts_have_their_words_behind_the_totals(
    connection: asyncpg.Connection, indexer: ResultIndexer
) -> None:
    ids = await add(connection, 3, output=LONG)
    await indexer.count()
    assert indexer.words._wake.is_set()
    assert await connection.fetchval(COUNTED) == 3
    assert await connection.fetchval("SELECT sum(results) FROM usage_entries") == 3
    assert await found(connection, "text") == []
    # A process of a former version looks from place 0 on, and finds none of them.
    assert await connection.fetchval("SELECT max(place) FROM undigested_results") < 0
    await connection.execute("DELETE FROM results WHERE id = $1", ids[0])
    await indexer.words.index()
    assert set(await found(connection, "text")) == set(ids[1:])
    assert await connection.fetchval("SELECT count(*) FROM undigested_results") == 0


async def test_short_texts_have_their_words_with_the_totals(
    connection: asyncpg.Connection, indexer: ResultIndexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many bytes of them together: of three results that fit alone, the last has its words later."""
    monkeypatch.setattr(results_indexer, "_SHORT_BYTES", 200)
    monkeypatch.setattr(results_indexer, "_ALL_SHORT_BYTES", 440)
    (chat,) = await add(connection)
    await connection.execute(
        "UPDATE contexts SET content = NULL, messages = $1",
        json.dumps(
            [{"role": "user", "content": "ask " * 10}, {"role": "user", "content": "again"}]
        ),
    )
    await add(connection, prompt="x" * 197)
    short = sorted(await add(connection, 3, prompt="é" * 70))
    assert not indexer.words._wake.is_set()
    await indexer.count()
    assert await found(connection, "again") == [chat]
    assert set(await found(connection, "text")) == {chat, *short[:2]}
    await indexer.words.index()
    assert len(await found(connection, "text")) == 5


async def test_a_backlog_of_words_is_worked_off_and_newer_ones_do_not_wait_for_it(
    connection: asyncpg.Connection, indexer: ResultIndexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(word_indexer, "_MAX_ROWS", 4)
    older = await add(connection, 20, team="many", output=LONG)
    await indexer.count()
    (new,) = await add(connection, team="other", output=LONG)
    await indexer.count()
    assert await indexer.words.index()
    first = await found(connection, "text")
    assert new in first
    assert len(first) == 8
    while await indexer.words.index():
        pass
    assert set(await found(connection, "text")) == {*older, new}


async def test_a_turn_ends_in_time_and_goes_on_where_it_ended(
    connection: asyncpg.Connection, indexer: ResultIndexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add(connection, 5, output=LONG)
    await indexer.count()
    with monkeypatch.context() as patched:
        patched.setattr(word_indexer, "_TURN_SECONDS", 0.0)
        assert await indexer.words.index()
    assert await found(connection, "text") == []
    assert not await indexer.words.index()
    assert len(await found(connection, "text")) == 5


def test_a_team_with_long_texts_has_its_turn_behind_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(word_indexer, "_PIECE_BYTES", 10)
    rows = [
        {"id": number, "team_id": team, "size": size}
        for number, (team, size) in enumerate(
            [("long", 9), ("long", 9), ("a", 3), ("a", 3), ("b", 1), ("long", 99)]
        )
    ]
    pieces = pieces_in_turns(cast(list[asyncpg.Record], rows))
    assert [[cast(Any, one)["id"] for one in piece] for piece in pieces] == [
        [4, 2, 3], [0], [1], [5],
    ]  # fmt: skip
    assert list(pieces_in_turns([])) == []


async def test_words_that_are_found_while_their_prompt_is_erased_lose_it(
    connection: asyncpg.Connection, indexer: ResultIndexer
) -> None:
    """The queue of words has the result again; its context is empty by then."""
    (one,) = await add(connection, prompt="secret", output=LONG)
    await indexer.count()
    await connection.execute("UPDATE contexts SET content = '', erased_at = now()")
    await indexer.words.index()
    assert await found(connection, "secret") == []
    assert await found(connection, "text") == [one]
