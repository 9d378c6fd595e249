"""Downloads over HTTP: a worker runs each to its end, after deaths too, and a cancelled one stops."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from pydantic import SecretStr

from app.core.database import Database
from app.core.errors import LimitError
from app.core.settings import Settings
from app.provisioning import download_store, downloader
from app.provisioning.download_store import MAX_OPEN, DownloadStore, ModelDownload
from app.provisioning.hub_token import HubToken
from tests.conftest import Service, run_service
from tests.hugging_face_hub import COMMIT, HuggingFaceHub, sha256
from tests.integration.auth.test_auth import bearer, guarded
from tests.integration.launching import Worker, with_profiles
from tests.integration.provisioning.test_model_download import (
    MODEL,
    OTHERS,
    SERVED,
    WEIGHTS,
    content_of,
    downloaded,
    has_ended,
    hub,
    is_held,
    no_proxy,
    program_of,
)
from tests.integration.queue.test_teams import BLUE, RED
from tests.integration.support import assert_problem, until
from tests.unit.auth.test_jwt import sign

__all__ = ["guarded", "hub", "no_proxy"]

PATH = "/launches/downloads"
TOTAL = sum(map(len, SERVED.values()))
PROFILES = """
[profiles.here]
provider = "local"
home = "HOME"
runtime = "plain"
cache = "CACHE"
[profiles.far]
provider = "slurm"
host = "127.0.0.1"
ssh_port = 9
home = "/scratch/llm"
runtime = "plain"
cache = "/scratch/cache"
[profiles.bare]
provider = "local"
home = "HOME"
runtime = "plain"
"""


def downloading(settings: Settings, place: Path, endpoint: str, **changes: object) -> Settings:
    profiles = PROFILES.replace("CACHE", str(place / "cache"))
    return with_profiles(settings, place, profiles, hub_endpoint=endpoint, **changes)


@pytest.fixture
def endpoint(hub: HuggingFaceHub) -> Iterator[str]:
    with hub.run() as address:
        yield address


@pytest.fixture
async def service(settings: Settings, tmp_path: Path, endpoint: str) -> AsyncIterator[Service]:
    async with run_service(downloading(settings, tmp_path, endpoint), with_worker=True) as running:
        yield running


def blobs_of(place: Path) -> Path:
    return place / "cache/hub/models--owner--sheep/blobs"


async def ask(service: Service, **members: object) -> dict[str, Any]:
    answer = await service.client.post(PATH, json={"model": MODEL} | members)
    assert answer.status_code == 202, answer.text
    accepted: dict[str, Any] = answer.json()
    assert answer.headers["location"] == f"{PATH}/{accepted['id']}"
    return accepted


async def read(service: Service, download: dict[str, Any]) -> dict[str, Any]:
    answer = await service.client.get(f"{PATH}/{download['id']}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def ended(service: Service, download: dict[str, Any]) -> dict[str, Any]:
    async def has_ended() -> dict[str, Any] | None:
        found = await read(service, download)
        return found if found["ended_at"] else None

    found: dict[str, Any] = await until(has_ended, 60)
    return found


async def test_a_model_is_downloaded(service: Service, tmp_path: Path) -> None:
    accepted = await ask(service)
    assert (accepted["state"], accepted["profile"], accepted["revision"]) == (
        "queued",
        "here",
        "main",
    )
    found = await ended(service, accepted)
    assert (found["state"], found["reason"], found["commit"]) == ("completed", "", COMMIT)
    assert found["done_bytes"] == found["total_bytes"] == TOTAL
    assert content_of(tmp_path) == SERVED
    again = await ended(service, await ask(service, profile="here", revision=COMMIT))
    assert again["state"] == "completed"
    listed = (await service.client.get(PATH)).json()
    assert listed == [again, found]
    (page,) = (await service.client.get(PATH, params={"limit": 1})).json()
    rest = await service.client.get(PATH, params={"after": page["id"]})
    assert rest.json() == [found]


@pytest.mark.trial
async def test_progress_is_shown_and_a_cancelled_download_stops(
    service: Service, hub: HuggingFaceHub, tmp_path: Path
) -> None:
    hub.hold = 400_000
    accepted = await ask(service)
    await is_held(hub)

    async def is_shown() -> bool:
        found = await read(service, accepted)
        assert found["state"] == "running"
        return bool(found["total_bytes"] == TOTAL and found["done_bytes"] > 200_000)

    await until(is_shown)
    await until(lambda: asyncio.sleep(0, (blobs_of(tmp_path) / sha256(OTHERS)).exists()))
    assert_problem(await service.client.post(PATH, json={"model": MODEL}), 409, "conflict")
    program = program_of(tmp_path)
    answer = await service.client.post(f"{PATH}/{accepted['id']}/cancel")
    assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")

    async def is_over() -> bool:
        return has_ended(program)

    await until(is_over)
    # The next one continues.
    hub.hold = None
    hub.released.set()
    found = await ended(service, await ask(service))
    assert found["state"] == "completed"
    assert hub.requests["model-00002-of-00002.safetensors"] == 1
    cancelled = await service.client.post(f"{PATH}/{accepted['id']}/cancel")
    assert cancelled.json()["state"] == "cancelled"
    assert (await service.client.post(f"{PATH}/{found['id']}/cancel")).json() == found
    assert content_of(tmp_path) == SERVED


@pytest.mark.trial
async def test_a_killed_worker_is_replaced(
    settings: Settings, hub: HuggingFaceHub, endpoint: str, tmp_path: Path
) -> None:
    hub.hold = 400_000
    changed = downloading(settings, tmp_path, endpoint)
    async with run_service(changed, with_worker=False) as api:
        accepted = await ask(api)
        first = Worker(changed, tmp_path)
        await first.start()
        await is_held(hub)
        program = program_of(tmp_path)
        part = blobs_of(tmp_path) / f"{sha256(WEIGHTS)}.download.incomplete"
        await until(lambda: asyncio.sleep(0, part.exists() and part.stat().st_size > 200_000))
        await first.kill()

        async def is_over() -> bool:
            return has_ended(program)

        await until(is_over)
        assert (await read(api, accepted))["state"] == "running"
        hub.hold = None
        hub.released.set()
        second = Worker(changed, tmp_path)
        await second.start()
        try:
            found = await ended(api, accepted)
        finally:
            await second.stop()
    assert (found["state"], found["attempt"]) == ("completed", 2)
    assert content_of(tmp_path) == SERVED
    # The second attempt continued: 400,000 bytes of the first, and the rest of 600,000.
    assert hub.sent["model-00001-of-00002.safetensors"] < 900_000


async def test_a_gated_model_needs_the_stored_token(
    settings: Settings, hub: HuggingFaceHub, endpoint: str, tmp_path: Path
) -> None:
    token = f"hf_{secrets.token_hex(16)}"
    hub.tokens = {token}
    changed = downloading(
        settings, tmp_path, endpoint, hugging_face_token_file=tmp_path / "token",
        seal_secret=SecretStr(secrets.token_hex(32)),
    )  # fmt: skip
    async with run_service(changed, with_worker=True) as service:
        refused = await ended(service, await ask(service))
        assert refused["state"] == "failed"
        assert "gated" in refused["reason"]
        HubToken(changed).store(token)
        found = await ended(service, await ask(service))
        assert found["state"] == "completed"
        (tmp_path / "token").write_bytes(b"changed")
        broken = await ended(service, await ask(service))
        assert broken["state"] == "failed"
        assert "stored token cannot be read" in broken["reason"]


async def test_a_host_that_is_away_is_tried_again(
    service: Service, connection: asyncpg.Connection
) -> None:
    accepted = await ask(service, profile="far")

    async def is_waiting() -> dict[str, Any] | None:
        found = await read(service, accepted)
        return found if found["state"] == "queued" and found["reason"] else None

    found = await until(is_waiting, 60)
    assert "127.0.0.1 cannot be reached by ssh" in found["reason"]
    assert (found["attempt"], found["ended_at"]) == (1, None)
    await connection.execute("UPDATE model_downloads SET failures = 9, next_attempt_at = now()")
    failed = await ended(service, accepted)
    assert failed["state"] == "failed"
    assert failed["reason"].endswith(" (10 attempts without progress)")


@pytest.mark.trial
async def test_a_host_that_is_busy_with_the_model_is_tried_again(
    service: Service,
    hub: HuggingFaceHub,
    endpoint: str,
    tmp_path: Path,
    connection: asyncpg.Connection,
) -> None:
    """A frozen worker's download, or an operator's command, is no end of this one."""
    hub.hold = 400_000
    other = asyncio.create_task(downloaded(tmp_path, endpoint))
    await is_held(hub)
    accepted = await ask(service)

    async def is_refused() -> bool:
        found = await read(service, accepted)
        assert found["ended_at"] is None
        return "Another download of owner/sheep" in str(found["reason"])

    await until(is_refused)
    hub.hold = None
    hub.released.set()
    await other
    await connection.execute("UPDATE model_downloads SET next_attempt_at = now()")
    found = await ended(service, accepted)
    assert (found["state"], found["reason"]) == ("completed", "")


async def test_an_unknown_model_has_a_reason(service: Service) -> None:
    found = await ended(service, await ask(service, model="owner/goat"))
    assert found["state"] == "failed"
    assert "owner/goat" in found["reason"]


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"model": "/scratch/models/x"}, "model"),
        ({"model": "owner/a--b"}, "model"),
        ({"model": MODEL, "revision": "../x"}, "revision"),
        ({"model": MODEL, "profile": "nowhere"}, "profile"),
        ({"model": MODEL, "profile": "bare"}, "profile"),
        ({"model": MODEL, "cache": "/"}, "cache"),
        ({}, "model"),
    ],
)
async def test_wrong_requests(service: Service, members: dict[str, object], field: str) -> None:
    answer = await service.client.post(PATH, json=members)
    assert_problem(answer, 422, "invalid_request", field)
    assert (await service.client.get(PATH)).json() == []


async def test_a_service_without_profiles(settings: Settings) -> None:
    async with run_service(settings, with_worker=False) as service:
        answer = await service.client.post(PATH, json={"model": MODEL})
        assert_problem(answer, 422, "invalid_request", "profile")
        assert "LLM_PROFILES_FILE" in answer.text


async def test_only_operators_download_and_only_a_team_sees_its_own(
    guarded: Settings, endpoint: str, tmp_path: Path
) -> None:
    reader = bearer(sign({"team_id": "red", "token_id": "u", "scopes": ["use"]}))
    changed = downloading(guarded, tmp_path, endpoint)
    async with run_service(changed, with_worker=False) as service:
        post, get = service.client.post, service.client.get
        body = {"model": MODEL}
        assert_problem(await post(PATH, json=body, headers=reader), 403, "forbidden")
        own = (await post(PATH, json=body, headers=RED)).json()
        one = f"{PATH}/{own['id']}"
        assert (await get(one, headers=reader)).json() == own
        assert (await get(PATH, headers=reader)).json() == [own]
        assert_problem(await post(f"{one}/cancel", headers=reader), 403, "forbidden")
        assert (await get(PATH, headers=BLUE)).json() == []
        assert_problem(await get(one, headers=BLUE), 404, "not_found")
        assert_problem(await post(f"{one}/cancel", headers=BLUE), 404, "not_found")
        # The cache is common, and each team's order is its own.
        other = await post(PATH, json=body, headers=BLUE)
        assert other.status_code == 202
        assert (await get(PATH, headers=BLUE)).json() == [other.json()]
        assert_problem(await post(PATH, json=body, headers=RED), 409, "conflict")
        assert (await get(one, headers=RED)).json()["state"] == "queued"


async def test_open_downloads_are_bounded(
    settings: Settings, endpoint: str, tmp_path: Path, connection: asyncpg.Connection
) -> None:
    async with run_service(downloading(settings, tmp_path, endpoint), with_worker=False) as service:
        for number in range(MAX_OPEN):
            await ask(service, model=f"owner/m{number}")
        answer = await service.client.post(PATH, json={"model": "owner/last"})
        assert_problem(answer, 429, "limit_reached")
        await connection.execute(
            "UPDATE model_downloads SET state = 'failed', ended_at = now() WHERE model = 'owner/m0'"
        )
        await ask(service, model="owner/last")


@pytest.fixture
async def store(settings: Settings) -> AsyncIterator[DownloadStore]:
    async with Database(settings, "test") as database:
        yield DownloadStore(database)


async def test_a_worker_that_lost_its_lease_changes_nothing(store: DownloadStore) -> None:
    made = await store.create("red", "here", MODEL, "main")
    late = await store.claim(["here"], -1.0)
    assert await store.claim(["nowhere"], 60.0) is None
    current = await store.claim(["here"], 60.0)
    assert late is not None
    assert current is not None
    assert (late.attempt, current.attempt) == (1, 2)
    assert await store.claim(["here"], 60.0) is None
    assert not await store.renew(late, 1, 2, 60.0)
    await store.retry(late, "x")
    await store.release(late)
    await store.complete(late, "c", 1)
    await store.fail(late, "x")
    assert await store.get("red", made.id) == current
    assert await store.renew(current, 1, 2, 60.0)
    await store.complete(current, "c", 2)
    assert not await store.renew(current, 1, 2, 60.0)
    found = await store.get("red", UUID(str(made.id)))
    assert (found.state, found.commit, found.done_bytes) == ("completed", "c", 2)


async def test_progress_forgives_failures(
    store: DownloadStore, connection: asyncpg.Connection
) -> None:
    await store.create("red", "here", MODEL, "main")
    # Bytes that are fetched again are no progress.
    for failures, done in ((0, 0), (1, 0), (2, 5), (1, 1), (2, 3), (3, 5)):
        claimed = await store.claim(["here"], 60.0)
        assert claimed is not None
        assert claimed.failures == failures
        assert await store.renew(claimed, done, 9, 60.0)
        await store.retry(claimed, "away")
        pause = "SELECT extract(epoch FROM next_attempt_at - now())::float8 FROM model_downloads"
        expected = 15 * 2 ** (0 if (failures, done) == (2, 5) else failures)
        assert expected - 10 < await connection.fetchval(pause) <= expected
        await connection.execute("UPDATE model_downloads SET next_attempt_at = now()")
    claimed = await store.claim(["here"], 60.0)
    assert claimed is not None
    await store.release(claimed)
    again = await store.claim(["here"], 60.0)
    assert again is not None
    assert (again.attempt, again.failures) == (claimed.attempt + 1, claimed.failures)


async def test_teams_take_turns_and_a_model_is_fetched_once_at_a_time(store: DownloadStore) -> None:
    for number in range(3):
        await store.create("red", "here", f"owner/m{number}", "main")
    for model in ("owner/m0", "owner/own"):
        await store.create("blue", "here", model, "main")
    order = [await store.claim(["here"], 60.0) for _ in range(5)]
    assert [one and one.model for one in order] == [
        "owner/m0", "owner/own", "owner/m1", "owner/m2", None,
    ]  # fmt: skip
    assert order[0] is not None
    await store.complete(order[0], "c", 1)
    last = await store.claim(["here"], 60.0)
    assert last is not None
    assert last.model == "owner/m0"


async def test_the_bound_holds_for_requests_at_once(
    store: DownloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_store, "MAX_OPEN", 3)
    made = await asyncio.gather(
        *(store.create("red", "here", f"owner/m{number}", "main") for number in range(12)),
        return_exceptions=True,
    )
    assert sum(isinstance(one, ModelDownload) for one in made) == 3
    assert sum(isinstance(one, LimitError) for one in made) == 9


async def test_a_removed_profile_is_named_as_the_reason(
    settings: Settings, endpoint: str, tmp_path: Path, connection: asyncpg.Connection
) -> None:
    async with run_service(downloading(settings, tmp_path, endpoint), with_worker=True) as service:
        accepted = await ask(service, profile="far")
        await connection.execute("UPDATE model_downloads SET profile = 'gone'")
        found = await read(service, accepted)
        assert found["ended_at"] is None
        assert "cancel the download" in found["reason"]


async def test_a_stopped_worker_hands_its_downloads_over(
    settings: Settings, hub: HuggingFaceHub, endpoint: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(downloader, "_RELEASE_SECONDS", 60.0)
    hub.hold = 400_000
    changed = downloading(settings, tmp_path, endpoint, launch_lease_seconds=600.0)
    async with run_service(changed, with_worker=False) as api:
        async with run_service(changed, with_worker=True):
            accepted = await ask(api)
            await is_held(hub)
        assert (await read(api, accepted))["state"] == "queued"
        hub.hold = None
        hub.released.set()
        async with run_service(changed, with_worker=True):
            assert (await ended(api, accepted))["state"] == "completed"
    assert content_of(tmp_path) == SERVED


async def test_an_end_that_cannot_be_stored_is_an_end(
    service: Service, monkeypatch: pytest.MonkeyPatch, hub: HuggingFaceHub
) -> None:
    async def refuse(*_: object) -> None:
        raise asyncpg.DataError("refused")

    monkeypatch.setattr(DownloadStore, "complete", refuse)
    found = await ended(service, await ask(service))
    assert (found["state"], found["attempt"]) == ("failed", 1)
    assert "a bug in the service" in found["reason"]


async def refuse(*_: object) -> bool:
    raise ConnectionResetError


async def hang(*_: object) -> bool:
    await asyncio.sleep(1000)  # until it is cancelled
    return True


@pytest.mark.parametrize("fault", [refuse, hang])
@pytest.mark.trial
async def test_a_database_that_is_away_for_longer_than_the_lease_ends_the_download(
    service: Service,
    hub: HuggingFaceHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[..., Awaitable[bool]],
) -> None:
    """Or another worker's attempt would meet this one's on the host."""

    hub.hold = 400_000
    accepted = await ask(service)
    await is_held(hub)
    program = program_of(tmp_path)
    monkeypatch.setattr(DownloadStore, "renew", fault)
    monkeypatch.setattr(DownloadStore, "claim", lambda *_: asyncio.sleep(0))

    async def is_over() -> bool:
        return has_ended(program)

    await until(is_over)
    assert (await read(service, accepted))["state"] == "running"  # until its lease ends
