"""The next attempt continues the text of a lost one: what is stored, sent, read and counted."""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import psutil
import pytest

from app.cli.up.triton import STUB
from app.core.settings import Settings
from app.inference.triton_client import CannotContinueError
from app.inference.triton_messages import Delta, EarlierText
from tests.chaos.stack import MortalTriton
from tests.conftest import SCRIPTED, Service, run_service, run_triton, short_lease
from tests.integration.launching import Worker
from tests.integration.stream_reader import Reader
from tests.integration.support import finish, read, send, serve, until, until_running

TEXT = " ".join(f"w{n}-é🙂" for n in range(60))
# A text that takes some seconds.
SLOW = f"{{{{delay_ms=50 text={TEXT}}}}}"


def losing(at: int, *, fault: str = "lost_at", once: str = "once", delay: int = 5) -> str:
    """A prompt whose first attempt is lost after `at` chunks of TEXT."""
    return f"{{{{{once} {fault}={at} delay_ms={delay} text={TEXT}}}}}"


@pytest.fixture
async def one(settings: Settings) -> AsyncIterator[Service]:
    """API and worker in one process, behind a socket."""
    async with serve(settings, with_worker=True) as service:
        yield service


@pytest.fixture
async def elsewhere(settings: Settings) -> AsyncIterator[Service]:
    """An API without a worker: it reads all text from the table."""
    async with serve(settings) as service:
        yield service


async def begin(settings: Settings, connection: asyncpg.Connection, max_tokens: int = 100) -> str:
    """A result that waits with kept text: its worker has stopped, and the next writes the rest at once."""
    impatient = settings.model_copy(update={"shutdown_grace_seconds": 0.1})
    async with run_service(impatient, with_worker=True) as service:
        sent = await send(service, SLOW, parameters={"max_tokens": max_tokens})
        await until_running(service, sent["id"])
    await hurry(connection)
    return str(sent["id"])


async def hurry(connection: asyncpg.Connection) -> None:
    """From its next attempt on, SLOW takes no time."""
    await connection.execute(
        "UPDATE contexts SET content = replace(content, 'delay_ms=50', 'delay_ms=0')"
    )


@pytest.fixture
async def waiting(
    settings: Settings, connection: asyncpg.Connection, elsewhere: Service
) -> dict[str, Any]:
    """A result that waits with kept text, and no worker."""
    return await read(elsewhere, await begin(settings, connection, 65), partial=True)


async def attempts(service: Service, result_id: str) -> list[dict[str, Any]]:
    answer = await service.client.get(f"/results/{result_id}/attempts")
    found: list[dict[str, Any]] = answer.json()
    return found


async def has_no_chunks(connection: asyncpg.Connection) -> bool:
    return bool(await connection.fetchval("SELECT count(*) = 0 FROM result_chunks"))


def words(text: str) -> int:
    return len(text.split(" "))


# --- the text, the counts ---------------------------------------------------------------------------


async def test_a_lost_attempt_is_continued_where_it_was(
    one: Service, connection: asyncpg.Connection
) -> None:
    result = await finish(one, losing(30), parameters={"max_tokens": 100})
    assert (result["state"], result["result"]) == ("completed", TEXT)
    assert (result["attempt"], result["continued"], result["finish_reason"]) == (2, 1, "stop")
    alone = await finish(one, losing(61), parameters={"max_tokens": 100})
    assert (alone["attempt"], alone["continued"]) == (1, 0)
    assert result["usage"]["completion_tokens"] == 60
    first, second = await attempts(one, result["id"])
    assert (first["counted"], first["continued_from"]) == (True, None)
    assert first["error"]["code"] == "triton_lost"
    # No token is generated twice: the last text is stored before the end.
    assert words(TEXT[: second["continued_from"]]) == 30
    assert (second["attempt"], second["counted"], second["error"]) == (2, True, None)
    assert await has_no_chunks(connection)


async def test_the_budget_is_that_of_the_whole_text(one: Service) -> None:
    result = await finish(one, losing(30), parameters={"max_tokens": 40, "min_tokens": 35})
    assert result["result"] == " ".join(TEXT.split(" ")[:40])
    assert (result["finish_reason"], result["usage"]["completion_tokens"]) == ("length", 40)
    assert result["continued"] == 1


async def test_an_attempt_lost_behind_its_last_token_ends_with_nothing_more(one: Service) -> None:
    result = await finish(one, losing(60), parameters={"max_tokens": 100})
    assert (result["state"], result["result"]) == ("completed", TEXT)
    assert (result["finish_reason"], result["continued"]) == ("stop", 1)
    assert result["usage"]["completion_tokens"] == 60


async def test_a_nul_that_is_stored_as_another_character_is_continued(one: Service) -> None:
    prompt = f"{{{{nul once lost_at=30 delay_ms=5 text={TEXT}}}}}"
    result = await finish(one, prompt, parameters={"max_tokens": 100})
    assert result["result"] == "\ufffd" + TEXT
    assert result["continued"] == 1


@pytest.mark.trial
async def test_a_text_that_loses_its_engine_at_once_is_dropped(one: Service) -> None:
    """Two attempts to continue it are lost before their first token; the third starts over."""
    result = await finish(one, losing(5, once=""))
    assert (result["state"], result["error"]["code"]) == ("failed", "engine_crashed")
    history = await attempts(one, result["id"])
    places = [
        entry["continued_from"] and words(TEXT[: entry["continued_from"]]) for entry in history
    ]
    assert places == [None, 5, 5, None, None, 5]
    assert [entry["counted"] for entry in history] == [True, True, True, False, True, True]
    assert history[3]["error"]["code"] == "not_continued"
    assert "lost before their first token" in history[3]["error"]["message"]


async def test_a_long_answer_is_continued_within_seconds(one: Service) -> None:
    """Lost at token 20,000 of 30,000: what is stored is not generated again."""
    sent = await send(one, "{{once lost_at=20000}}", parameters={"max_tokens": 30_000})
    result = await read(one, sent["id"], wait=55)
    assert (result["state"], result["continued"]) == ("completed", 1)
    assert result["usage"]["completion_tokens"] == words(result["result"]) == 30_000
    _, second = await attempts(one, sent["id"])
    assert words(result["result"][: second["continued_from"]]) == 20_000


# --- workers that stop or die -----------------------------------------------------------------------


async def test_a_stopping_worker_hands_its_text_to_the_next(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    result_id = await begin(settings, connection)
    async with run_service(settings, with_worker=True) as service:
        result = await read(service, result_id, wait=30)
        (entry,) = await attempts(service, result_id)
    assert (result["result"], result["attempt"], result["continued"]) == (TEXT, 2, 1)
    assert result["usage"]["completion_tokens"] == 60
    assert (entry["attempt"], entry["continued_from"] > 0) == (2, True)
    assert await connection.fetchval("SELECT lost_attempts FROM results") == 0
    assert await has_no_chunks(connection)


@short_lease
@pytest.mark.trial
async def test_the_stored_text_of_a_killed_worker_is_continued(
    elsewhere: Service, settings: Settings, connection: asyncpg.Connection, tmp_path: Path
) -> None:
    """`kill -9`: its chunks are all there is. A reader sees no gap, and no text twice."""
    first, second = Worker(settings, tmp_path), Worker(settings, tmp_path)
    await first.start(lambda _: None)
    reader = Reader()
    try:
        sent = await send(elsewhere, SLOW, parameters={"max_tokens": 100})
        reading = asyncio.create_task(reader.read(elsewhere.client, sent["id"]))

        async def has_read() -> bool:
            return len(reader.text) > 50

        await until(has_read)
        await first.kill()
        await connection.execute("UPDATE workers SET lease_expires_at = now()")
        await hurry(connection)
        await second.start(lambda _: None)
        await asyncio.wait_for(reading, 60)
    finally:
        await second.stop()
    assert reader.result is not None
    assert (reader.text, reader.attempts, reader.dropped) == (TEXT, [1, 2], 0)
    assert reader.characters == len(TEXT)
    assert (reader.result["result"], reader.result["continued"]) == (TEXT, 1)
    assert reader.result["usage"]["completion_tokens"] == 60
    assert await has_no_chunks(connection)


# --- readers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["one", "elsewhere"])
@pytest.mark.trial
async def test_a_readers_stream_goes_on_across_the_loss(
    one: Service, elsewhere: Service, side: str
) -> None:
    sent = await send(one, losing(20, delay=30), parameters={"max_tokens": 100})
    reader = Reader()
    service = {"one": one, "elsewhere": elsewhere}[side]
    await asyncio.wait_for(reader.read(service.client, sent["id"]), 60)
    assert reader.result is not None
    assert (reader.text, reader.attempts, reader.dropped) == (TEXT, [1, 2], 0)
    assert reader.characters == len(TEXT)
    assert reader.result["result"] == TEXT
    # And, that of a reader who begins, begins with the second attempt.
    late = Reader()
    await asyncio.wait_for(late.read(service.client, sent["id"]), 60)
    assert (late.text, late.attempts) == (TEXT, [2])


@pytest.mark.parametrize("side", ["one", "elsewhere"])
async def test_a_position_of_a_lost_attempt_is_good_when_all_is_over(
    one: Service, elsewhere: Service, side: str
) -> None:
    sent = await send(one, losing(20), parameters={"max_tokens": 100})
    result = await read(one, sent["id"], wait=30)
    assert result["continued"] == 1
    service = {"one": one, "elsewhere": elsewhere}[side]
    kept = (await attempts(one, sent["id"]))[1]["continued_from"]
    for known, place in ((TEXT[:40], 40), (TEXT[:kept] + "more", kept)):
        # The second one read text from memory that was never stored: it is replaced.
        reader = Reader(text=known, attempt=1, position=f"1:{len(known)}")
        await asyncio.wait_for(reader.read(service.client, sent["id"]), 30)
        assert (reader.text, reader.attempts) == (TEXT, [2])
        assert (reader.dropped, reader.characters) == (len(known) - place, len(TEXT) - place)


@pytest.mark.parametrize("side", ["one", "elsewhere"])
@pytest.mark.trial
async def test_a_reader_that_knows_more_than_was_kept_drops_the_rest(
    one: Service, elsewhere: Service, connection: asyncpg.Connection, side: str
) -> None:
    """It read from the memory of a worker that was killed; meanwhile the next one continues."""
    sent = await send(one, losing(20, delay=40), parameters={"max_tokens": 100})

    async def kept() -> int | None:
        found = await attempts(one, sent["id"])
        return found[1]["continued_from"] if len(found) > 1 else None

    place: int = await until(kept)
    known = TEXT[:place] + "never stored"
    service = {"one": one, "elsewhere": elsewhere}[side]
    reader = Reader(text=known, attempt=1, position=f"1:{len(known)}")
    await asyncio.wait_for(reader.read(service.client, sent["id"]), 60)
    assert (reader.text, reader.attempts) == (TEXT, [2])
    assert reader.dropped == len("never stored")
    assert reader.characters == len(TEXT) - place


# --- when it does not happen ------------------------------------------------------------------------


@pytest.fixture
async def twice(settings: Settings) -> AsyncIterator[Service]:
    """A service that allows two attempts."""
    async with run_service(
        settings.model_copy(update={"max_attempts": 2}), with_worker=True
    ) as service:
        yield service


async def test_a_request_may_opt_out(twice: Service, connection: asyncpg.Connection) -> None:
    prompt = losing(30, once="")
    sent = await send(
        twice,
        prompt,
        continue_lost_attempts=False,
        parameters={"max_tokens": 100},
        metadata={"a": 1},
    )
    result = await read(twice, sent["id"], wait=50)
    assert (result["state"], result["attempt"], result["continued"]) == ("failed", 2, 0)
    history = await attempts(twice, sent["id"])
    assert {entry["continued_from"] for entry in history} == {None}
    # Its retry asks for the same.
    retried = (await twice.client.post(f"/results/{sent['id']}/retry")).json()
    row = await connection.fetchval(
        "SELECT resumable FROM results WHERE id = $1", UUID(retried["id"])
    )
    assert row is False
    await twice.client.delete(f"/results/{retried['id']}?force=true")
    assert await has_no_chunks(connection)


async def test_a_seeded_answer_starts_over(twice: Service) -> None:
    sent = await send(twice, losing(30, once=""), parameters={"seed": 1, "max_tokens": 100})
    result = await read(twice, sent["id"], wait=50)
    assert (result["attempt"], result["continued"]) == (2, 0)


async def test_the_setting_turns_it_off_for_results_that_wait(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    result_id = await begin(settings, connection)
    off = settings.model_copy(update={"continue_lost_attempts": False})
    async with run_service(off, with_worker=True) as service:
        result = await read(service, result_id, wait=30)
        refused, *_ = await attempts(service, result_id)
    assert (result["result"], result["attempt"], result["continued"]) == (TEXT, 3, 0)
    assert "LLM_CONTINUE_LOST_ATTEMPTS" in refused["error"]["message"]
    assert await has_no_chunks(connection)


async def lose_ids(connection: asyncpg.Connection, change: str) -> None:
    """Spoil the stored text of a result that waits."""
    assert await connection.execute(f"UPDATE result_chunks SET {change}") != "UPDATE 0"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("token_ids = NULL", "ids of its tokens are not known"),
        ("token_ids = set_byte(token_ids, 0, (get_byte(token_ids, 0) + 1) % 256)", "not the ids"),
        ("text = overlay(text placing 'X' from 1)", "do not fit"),
        ('"offset" = "offset" + 1', "gap or an overlap"),
        ("completion_tokens = 1000", "longer than max_tokens"),
    ],
)
async def test_text_that_cannot_be_continued_is_generated_anew(
    settings: Settings, connection: asyncpg.Connection, change: str, reason: str
) -> None:
    """No attempt is counted, and nothing fails."""
    result_id = await begin(settings, connection)
    await lose_ids(connection, change)
    async with run_service(settings, with_worker=True) as service:
        reader = Reader(text=TEXT[:3], attempt=1, position="1:3")
        async with serve(settings) as api:
            await asyncio.wait_for(reader.read(api.client, result_id), 60)
        history = await attempts(service, result_id)
    assert reader.result is not None
    assert (reader.text, reader.attempts[-1], reader.result["continued"]) == (TEXT, 3, 0)
    assert reader.result["usage"]["completion_tokens"] == 60
    assert (history[0]["counted"], history[0]["error"]["code"]) == (False, "not_continued")
    assert reason in history[0]["error"]["message"]
    assert await connection.fetchval("SELECT lost_attempts FROM results") == 0
    assert await has_no_chunks(connection)


# --- models without the inputs ----------------------------------------------------------------------

_INPUTS = re.compile(r',\s*\{ name: "(?:return_token_ids|resume_\w+|token_ids)"[^}]*\}')


class Changing(MortalTriton):
    """A Triton whose model takes token ids, or takes none, as NVIDIA's backend."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._config = self.models["scripted"] / "config.pbtxt"
        self._text = self._config.read_text()

    async def has_no_stub(self) -> bool:
        assert self._process is not None
        family = psutil.Process(self._process.pid).children(recursive=True)
        return not any(
            child.name() in STUB and child.status() != psutil.STATUS_ZOMBIE for child in family
        )

    async def take_ids(self, *, takes: bool) -> None:
        text = self._text if takes else _INPUTS.sub("", self._text)
        assert ("resume_token_ids" in text) is takes
        self._config.write_text(text)
        async with self.client() as client:
            await client.unload("scripted")
            await client.load("scripted")


@pytest.fixture(scope="module")
def changing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Changing]:
    folder = tmp_path_factory.mktemp("changing")
    model = shutil.copytree(SCRIPTED["scripted"], folder / "scripted")
    with run_triton(Changing, folder, {"scripted": model}) as server:
        yield server


async def start_over(service: Service, connection: asyncpg.Connection, result_id: str) -> None:
    """The result waits on a model that takes no ids, and is generated from its start."""
    result = await read(service, result_id, wait=30)
    entries = await attempts(service, result_id)
    assert (result["result"], result["attempt"], result["continued"]) == (TEXT, 3, 0), entries
    refused = entries[0]
    assert "no input resume_token_ids" in refused["error"]["message"]
    assert await connection.fetchval("SELECT lost_attempts FROM results") == 0
    assert await has_no_chunks(connection)


@pytest.mark.trial
async def test_a_model_without_the_inputs_starts_over(
    settings: Settings, connection: asyncpg.Connection, waiting: dict[str, Any], changing: Changing
) -> None:
    await changing.take_ids(takes=False)
    there = settings.model_copy(update={"triton_grpc": changing.address("grpc")})
    async with run_service(there, with_worker=True) as service:
        await start_over(service, connection, waiting["id"])


@pytest.mark.trial
async def test_text_is_continued_as_a_prompt_where_that_is_allowed(
    settings: Settings, waiting: dict[str, Any], changing: Changing
) -> None:
    """The scripted model restarts its text after any prompt: the seam shows."""
    await changing.take_ids(takes=False)
    there = settings.model_copy(
        update={"triton_grpc": changing.address("grpc"), "continue_by_text": True}
    )
    async with run_service(there, with_worker=True) as service:
        result = await read(service, waiting["id"], wait=30)
        entries = await attempts(service, waiting["id"])
    done = entries[-1]["continued_from"]
    rest = result["result"][done:]
    assert result["result"][:done] == TEXT[:done]
    assert done >= len(waiting["result"])
    assert TEXT.startswith(rest)
    assert (result["attempt"], result["continued"]) == (2, 1)
    # One budget and one prompt for both.
    assert result["usage"] == {"prompt_tokens": len(SLOW.split()), "completion_tokens": 65}
    assert words(result["result"][:done]) + words(rest) == 65


@pytest.mark.trial
async def test_a_model_that_loses_the_inputs_fails_nothing(changing: Changing) -> None:
    """A reload, of which the client gets no notice: the request is refused, and sent again."""
    await changing.take_ids(takes=True)
    async with changing.client() as client:
        deltas: list[Delta] = []
        for takes in (True, False):
            await changing.take_ids(takes=takes)
            deltas.clear()
            await client.run("scripted", "{{chunks=3}}", {}, deltas.append, wants_ids=True)
            assert [delta.token_ids is not None for delta in deltas] == [takes] * 3
        earlier = EarlierText(deltas[0].text, b"\1\0\0\0")
        with pytest.raises(CannotContinueError):
            await client.run(
                "scripted", "{{chunks=3}}", {}, deltas.append, wants_ids=True, earlier=earlier
            )


@pytest.mark.trial
async def test_an_engine_that_is_killed_in_mid_text_is_continued_by_the_next(
    settings: Settings, connection: asyncpg.Connection, changing: Changing
) -> None:
    await changing.take_ids(takes=True)
    there = settings.model_copy(update={"triton_grpc": changing.address("grpc")})
    async with run_service(there, with_worker=True) as service:
        sent = await send(
            service, losing(40, fault="crash_at", delay=30), parameters={"max_tokens": 100}
        )

        async def is_dead() -> bool:
            return bool(await changing.has_no_stub())

        await until(is_dead)
        changing.kill_server()  # by itself it would wait for the model's dead process
        await changing.wait()
        await changing.start()
        result = await read(service, sent["id"], wait=60)
        first, *_ = await attempts(service, sent["id"])
        last = (await attempts(service, sent["id"]))[-1]
    assert (result["state"], result["result"], result["continued"]) == ("completed", TEXT, 1)
    assert result["usage"]["completion_tokens"] == 60
    assert first["error"]["code"] == "triton_lost"
    # All text that arrived before the death is kept.
    assert 30 < words(TEXT[: last["continued_from"]]) <= 40
    assert await has_no_chunks(connection)


# --- what waits for its next attempt ----------------------------------------------------------------


async def test_a_cancelled_result_has_its_kept_text(
    elsewhere: Service, connection: asyncpg.Connection, waiting: dict[str, Any]
) -> None:
    assert TEXT.startswith(waiting["result"])
    assert waiting["result"]
    answer = await elsewhere.client.post(f"/results/{waiting['id']}/cancel")
    result = answer.json()
    assert (result["error"]["code"], result["result"]) == ("cancelled", waiting["result"])
    assert result["usage"]["completion_tokens"] == words(waiting["result"])
    assert await has_no_chunks(connection)


async def test_an_expired_result_has_its_kept_text(
    elsewhere: Service, connection: asyncpg.Connection, waiting: dict[str, Any]
) -> None:
    await connection.execute("UPDATE results SET deadline_at = now()")
    result = await read(elsewhere, waiting["id"], wait=30)
    assert (result["error"]["code"], result["result"]) == ("deadline_exceeded", waiting["result"])
    assert await has_no_chunks(connection)


@pytest.mark.parametrize("what", ["results", "contexts"])
async def test_deleting_takes_the_kept_text_along(
    elsewhere: Service, connection: asyncpg.Connection, waiting: dict[str, Any], what: str
) -> None:
    identifier = waiting["id" if what == "results" else "context_id"]
    answer = await elsewhere.client.delete(f"/{what}/{identifier}?force=true")
    assert answer.status_code == 204
    assert await has_no_chunks(connection)
