"""Authentication on real PostgreSQL: keys, JWTs, revocation on every process, bad headers."""

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import asyncpg
import httpx
import pytest
from pydantic import SecretStr

from app.api.errors import tgi_errors
from app.api.middleware.access import OPEN_PATHS
from app.auth import authenticator
from app.auth.api_keys import new_key, prefix_of
from app.auth.authenticator import Authenticator
from app.auth.token_store import TokenStore
from app.core.errors import InvalidTokenError, NotFoundError
from app.core.settings import Settings
from app.ui.main import create_ui
from app.ui.settings import UiSettings
from tests.conftest import Service, run_service
from tests.integration.support import UNKNOWN_ID, assert_problem, assert_refusal, serve, until
from tests.unit.api.test_startup_checks import STRONG
from tests.unit.auth.test_jwt import OTHER_SECRET, raw, sign

CLAIMS = {"team_id": "red", "token_id": "t1"}
FOREVER = 10_000.0


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def guarded(settings: Settings) -> Settings:
    """Settings with authentication on."""
    return settings.model_copy(update={"jwt_secret": SecretStr(STRONG)})


@pytest.fixture
async def closed(guarded: Settings) -> AsyncIterator[Service]:
    """An API that needs tokens."""
    async with run_service(guarded, with_worker=False) as service:
        yield service


async def status(service: Service, token: str, path: str = "/results/") -> int:
    return (await service.client.get(path, headers=bearer(token))).status_code


async def is_refused(service: Service, token: str) -> bool:
    return await status(service, token) == 401


# --- who may come in --------------------------------------------------------------------------------


async def test_open_paths_need_no_token(closed: Service) -> None:
    for path in ("/health", "/health/live", "/health/ready", "/docs", "/docs/errors", "/", "/ping"):
        assert (await closed.client.get(path)).status_code == 200, path
    page = await closed.client.get("/docs")
    for asset in re.findall(r"""(?:src|href)=["']([^"']+)["']""", page.text):
        assert (await closed.client.get(asset)).status_code == 200, asset
    assert (await closed.client.get("/openapi.json")).status_code == 200


async def test_an_api_key_in_the_header_of_anthropics_clients(closed: Service) -> None:
    key = await closed.services.tokens.create("red")
    for token, expected in ((key.text, 200), (sign(CLAIMS), 200), (new_key().text, 401), ("", 401)):
        answer = await closed.client.get("/results/", headers={"x-api-key": token})
        assert answer.status_code == expected
    for other in ("", "Bearer", "Bearer ", "Basic dXNlcjpwYXNzd29yZA==", "Negotiate abc"):
        for token, expected in ((key.text, 200), (new_key().text, 401)):
            headers = {"x-api-key": token, "Authorization": other}
            answer = await closed.client.get("/results/", headers=headers)
            assert answer.status_code == expected, other
        answer = await closed.client.get("/results/", headers={"Authorization": other})
        assert_problem(answer, 401, "unauthenticated")
    both = {"x-api-key": key.text} | bearer(new_key().text)
    assert (await closed.client.get("/results/", headers=both)).status_code == 401
    twice = [("x-api-key", key.text), ("x-api-key", new_key().text)]
    assert (await closed.client.get("/results/", headers=twice)).status_code == 401


async def test_everything_else_does(closed: Service) -> None:
    document = (await closed.client.get("/openapi.json")).json()
    asked = 0
    for path, methods in [*document["paths"].items(), ("/nothing", {"get": {}})]:
        for method in methods:
            if method == "get" and path in OPEN_PATHS:
                continue
            url = re.sub(r"{\w+}", UNKNOWN_ID, path)
            answer = await closed.client.request(method, url)
            assert_refusal(path, answer, 401, "unauthenticated")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "Bearer" in answer.text or path.split("/")[1] in tgi_errors.SEGMENTS
            answer = await closed.client.request(
                method, url, headers=bearer(sign(CLAIMS, "x" * 40))
            )
            assert_refusal(path, answer, 401, "invalid_token")
            assert "invalid_token" in answer.headers["www-authenticate"]
            asked += 1
    assert asked > 15


async def test_the_document_lists_the_scope_of_each_operation(closed: Service) -> None:
    document = (await closed.client.get("/openapi.json")).json()
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    needed = {
        f"{method} {path}": operation["security"]
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert needed["get /results/"] == [{"bearer": ["use"]}]
    assert needed["get /health"] == []
    operators = {
        route for route, security in needed.items() if security == [{"bearer": ["operate"]}]
    }
    assert operators == {
        "post /models/{name}/load",
        "post /models/{name}/unload",
        "post /launches",
        "post /launches/{launch_id}/stop",
        "delete /launches/{launch_id}",
        "get /launches/{launch_id}/log",
        "post /launches/downloads",
        "post /launches/downloads/{download_id}/cancel",
        "get /servers",
        "get /system",
        "get /metrics",
        "post /servers",
        "get /servers/{name}",
        "delete /servers/{name}",
        "post /servers/{name}/drain",
        "post /servers/{name}/resume",
    }


async def test_a_jwt_and_a_key_are_let_in(closed: Service) -> None:
    key = await closed.services.tokens.create("red")
    assert await status(closed, sign(CLAIMS)) == 200
    assert await status(closed, key.text) == 200
    for scheme in ("bearer", "BEARER", "Bearer  "):
        answer = await closed.client.get(
            "/results/", headers={"Authorization": f"{scheme} {key.text}"}
        )
        assert answer.status_code == 200


async def test_the_caller_is_reported(closed: Service, api: Service) -> None:
    claims = CLAIMS | {"scopes": ["use", "operate", "fly"], "max_priority": 7}
    answer = await closed.client.get("/me", headers=bearer(sign(claims)))
    assert answer.json() == {
        "team_id": "red", "scopes": ["use", "operate"], "max_priority": 7, "token_id": "t1",
        "is_authenticated": True,
    }  # fmt: skip
    assert answer.headers["cache-control"] == "no-store"
    key = await closed.services.tokens.create("blue", max_priority=3)
    assert (await closed.client.get("/me", headers=bearer(key.text))).json() == {
        "team_id": "blue", "scopes": ["use"], "max_priority": 3, "token_id": prefix_of(key.text),
        "is_authenticated": True,
    }  # fmt: skip
    assert (await api.client.get("/me")).json() == {
        "team_id": "default", "scopes": ["use", "operate"], "max_priority": 0, "token_id": None,
        "is_authenticated": False,
    }  # fmt: skip


@pytest.mark.trial
async def test_what_one_token_makes_the_same_team_sees_and_no_other(closed: Service) -> None:
    key = await closed.services.tokens.create("red")
    made = await closed.client.post(
        "/contexts/", json={"content": "x"}, headers=bearer(sign(CLAIMS))
    )
    assert made.status_code == 201
    path = f"/contexts/{made.json()['id']}"
    assert await status(closed, key.text, path) == 200
    assert await status(closed, sign(CLAIMS | {"team_id": "blue"}), path) == 404


async def test_scopes(closed: Service) -> None:
    tokens = closed.services.tokens
    use = await tokens.create("red")
    operate = await tokens.create("red", scopes=["operate"])
    both = await tokens.create("red", scopes=["use", "operate"])
    none = sign(CLAIMS | {"scopes": []})
    for text, lists, loads in (
        (use.text, 200, 403), (operate.text, 403, 200), (both.text, 200, 200), (none, 403, 403),
    ):  # fmt: skip
        listed = await closed.client.get("/results/", headers=bearer(text))
        loaded = await closed.client.post("/models/scripted/load", headers=bearer(text))
        assert (listed.status_code, loaded.status_code) == (lists, loads)
        for answer in (listed, loaded):
            if answer.status_code == 403:
                assert_problem(answer, 403, "forbidden")


async def test_a_token_bounds_the_priority(closed: Service) -> None:
    key = await closed.services.tokens.create("red", max_priority=5)
    tokens = {key.text: 5, sign(CLAIMS | {"max_priority": 7}): 7, sign(CLAIMS): 0}
    for text, most in tokens.items():
        for priority, expected in ((most, 202), (most + 1, 422)):
            body = {"model": "scripted", "content": "x", "priority": priority}
            answer = await closed.client.post("/results/", json=body, headers=bearer(text))
            assert answer.status_code == expected


async def test_tickets_open_a_stream_without_a_header(closed: Service) -> None:
    made = await closed.client.post(
        "/results/", json={"model": "scripted", "content": "x"}, headers=bearer(sign(CLAIMS))
    )
    path = f"/results/{made.json()['id']}"
    issued = await closed.client.post(f"{path}/stream-ticket", headers=bearer(sign(CLAIMS)))
    await closed.client.post(f"{path}/cancel", headers=bearer(sign(CLAIMS)))
    ticket = {"ticket": issued.json()["ticket"]}
    answer = await closed.client.get(f"{path}/stream", params=ticket)
    assert answer.status_code == 200
    assert "event: failed" in answer.text
    # Once, this result's, and as it was issued.
    assert_problem(await closed.client.get(f"{path}/stream", params=ticket), 403, "bad_ticket")
    assert_problem(await closed.client.get(f"{path}/stream?ticket=x"), 403, "bad_ticket")
    assert (await closed.client.get(f"{path}/stream?ticket=")).status_code == 401
    assert (await closed.client.get(f"{path}?ticket=x")).status_code == 401


async def test_with_authentication_any_host_will_do_and_an_origin_is_the_host(
    closed: Service,
) -> None:
    token = bearer(sign(CLAIMS))
    for headers, expected in (
        ({"host": "llm.example"}, 200),
        ({"host": "llm.example:8", "origin": "https://llm.example"}, 200),
        ({"host": "llm.example", "origin": "https://evil.example"}, 403),
        ({"host": "llm.example", "origin": "null"}, 403),
    ):
        answer = await closed.client.get("/results/", headers=token | headers)
        assert answer.status_code == expected


async def test_if_authentication_is_off_all_callers_are_the_default_team(api: Service) -> None:
    for headers in ({}, bearer("x"), bearer(sign(CLAIMS))):
        assert (await api.client.get("/results/", headers=headers)).status_code == 200


# --- dialects ---------------------------------------------------------------------------------------


async def test_dialects_refuse_in_their_own_way(guarded: Settings) -> None:
    async with run_service(guarded, with_worker=True) as service:
        for headers in ({}, {"Authorization": "Basic dTpw"}, bearer("x")):
            answer = await service.client.post("/generate", json={"inputs": "x"}, headers=headers)
            assert (answer.status_code, answer.content) == (401, b"")
            answer = await service.client.post("/inference", json={"text": "x"}, headers=headers)
            is_bad = headers == bearer("x")
            assert answer.status_code == (400 if is_bad else 401)
            assert answer.json()["status_code"] == answer.status_code
            assert answer.json()["message"].startswith("JWT payload decode error: ") == is_bad
        token = bearer(sign({"team_id": "tenstorrent", "token_id": "debug-test"}))
        for path, name in (("/generate", "inputs"), ("/inference", "text")):
            body = {name: "hi {{chunks=2}}"}
            answer = await service.client.post(path, json=body, headers=token)
            assert answer.status_code == 200, answer.text
            result = await service.client.get(
                f"/results/{answer.headers['x-result-id']}", headers=token
            )
            assert result.json()["state"] == "completed"
            other = bearer(sign(CLAIMS))
            path = f"/results/{answer.headers['x-result-id']}"
            assert (await service.client.get(path, headers=other)).status_code == 404


# --- bad headers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (b"", "unauthenticated"), (b"Bearer", "unauthenticated"),
        (b"Basic dTpw", "unauthenticated"), (b"bearerx y", "unauthenticated"),
        (b"Token x", "unauthenticated"), (b"\xff\xfe", "unauthenticated"),
        (b"Bearer x", "invalid_token"), (b"Bearer a.b.c", "invalid_token"),
        (b"Bearer \xc3\xa4\xff", "invalid_token"), (b"Bearer a b", "invalid_token"),
        (b"Bearer llm_", "invalid_token"), (b"Bearer " + b"x" * 100_000, "invalid_token"),
        (b"Bearer " + b"." * 100_000, "invalid_token"), (b"x" * 100_000, "unauthenticated"),
        (b"Bearer llm_0123456789ab_" + b"x" * 43, "invalid_token"),
        (b"Bearer " + sign(CLAIMS, OTHER_SECRET).encode(), "invalid_token"),
        (b"Bearer " + sign(CLAIMS | {"exp": 1}).encode(), "invalid_token"),
        (b"Bearer " + sign(CLAIMS | {"nbf": 10**11}).encode(), "invalid_token"),
        (b"Bearer " + sign(CLAIMS | {"x": "y" * 9000}).encode(), "invalid_token"),
        (b"Bearer " + sign(CLAIMS | {"team_id": "a\x00"}).encode(), "invalid_token"),
    ],
    ids=lambda value: value[:24] if isinstance(value, bytes) else value,
)  # fmt: skip
async def test_bad_authorization_headers(guarded: Settings, header: bytes, code: str) -> None:
    """Over a socket: the server's own limits are part of it."""
    async with serve(guarded) as service:
        for method, body in (("GET", None), ("POST", b'{"model": "scripted", "content": "x"}')):
            answer = await service.client.request(
                method, "/results/", content=body, headers={b"Authorization": header}
            )
            assert_problem(answer, 401, code)
        # The connection and the service go on.
        assert await status(service, sign(CLAIMS)) == 200


async def test_a_strangers_large_body_is_not_read_but_answered(guarded: Settings) -> None:
    async with serve(guarded) as service:
        sent = 0

        async def pieces() -> AsyncIterator[bytes]:
            nonlocal sent
            for _ in range(64):
                sent += 65_536
                yield b"x" * 65_536

        answer = await service.client.post("/results/", content=pieces())
        assert_problem(answer, 401, "unauthenticated")
        assert await status(service, sign(CLAIMS)) == 200


async def test_nothing_of_a_token_is_logged_or_answered(
    closed: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key = await closed.services.tokens.create("red")
    texts = [key.text, key.text[:-1] + "!", new_key().text, sign(CLAIMS), sign(CLAIMS)[:-4],
             sign(CLAIMS, OTHER_SECRET), sign(CLAIMS | {"exp": 1}), "s3cr3t-of-nobody"]  # fmt: skip
    for text in texts:
        for path in ("/results/", "/nothing", "/models/scripted/load"):
            answer = await closed.client.post(path, headers=bearer(text))
            shown = answer.text + str(answer.headers) + caplog.text
            assert STRONG not in shown
            assert not [
                part for part in re.split(r"[._]", text) if len(part) > 12 and part in shown
            ]


@pytest.mark.parametrize(
    "foreign",
    [
        "sk-proj-Ab3",
        "hf_Ab3",
        "SG.Ab3.Cd4",
        "id.secret",
        "none",
        "llm_x",
        f"llm_0123456789ab_{'x' * 43}",
    ],
)
async def test_the_key_of_another_service_is_named_so(closed: Service, foreign: str) -> None:
    for headers in (bearer(foreign), {"x-api-key": foreign}):
        for path in ("/v1/chat/completions", "/v1/messages", "/results/"):
            answer = await closed.client.post(path, headers=headers)
            assert_refusal(path, answer, 401, "invalid_token")
            assert "invalid API key" in answer.text


async def test_several_headers_are_refused(closed: Service) -> None:
    good = f"Bearer {sign(CLAIMS)}"
    answer = await closed.client.get(
        "/results/", headers=[("Authorization", good), ("Authorization", good)]
    )
    assert_problem(answer, 401, "unauthenticated")


async def test_other_headers_may_be_long(guarded: Settings) -> None:
    async with serve(guarded) as service:
        headers = bearer(sign(CLAIMS)) | {"X-Long": "x" * 100_000}
        assert (await service.client.get("/results/", headers=headers)).status_code == 200
        assert await status(service, sign(CLAIMS)) == 200


# --- keys -------------------------------------------------------------------------------------------


async def test_what_is_stored_of_a_key_does_not_open_anything(
    closed: Service, connection: asyncpg.Connection
) -> None:
    key = await closed.services.tokens.create("red", name="n", max_priority=3)
    row = await connection.fetchrow("SELECT * FROM api_keys")
    assert row is not None
    assert (row["team_id"], row["name"], row["prefix"]) == ("red", "n", key.prefix)
    assert key.text.removeprefix(key.prefix)[1:] not in str(dict(row))
    for other in (f"{key.prefix}_{'x' * 43}", f"{key.prefix}_{row['key_hash'].hex()[:43]}"):
        assert await is_refused(closed, other)
    assert await status(closed, key.text) == 200
    found = await closed.services.authenticator.authenticate(
        [(b"authorization", f"Bearer {key.text}".encode())]
    )
    assert (found.team_id, found.max_priority, found.token_id) == ("red", 3, key.prefix)


@pytest.mark.trial
async def test_an_expired_key(closed: Service, connection: asyncpg.Connection) -> None:
    key = await closed.services.tokens.create("red", lifetime=timedelta(days=1))
    old = await closed.services.tokens.create("red", lifetime=timedelta(seconds=-1))
    assert await status(closed, key.text) == 200
    answer = await closed.client.get("/results/", headers=bearer(old.text))
    assert "expired" in assert_problem(answer, 401, "invalid_token")["detail"]
    # The cache does not extend its validity.
    soon = await closed.services.tokens.create("red", lifetime=timedelta(seconds=5))
    assert await status(closed, soon.text) == 200

    async def is_over() -> bool:
        return await is_refused(closed, soon.text)

    await until(is_over)


async def test_the_last_use_is_written_at_most_once_a_minute(
    closed: Service, connection: asyncpg.Connection
) -> None:
    key = await closed.services.tokens.create("red")
    query = "SELECT last_used_at FROM api_keys"
    authenticator = closed.services.authenticator
    await authenticator.write_uses()
    assert await connection.fetchval(query) is None
    for _ in range(3):
        assert await status(closed, key.text) == 200
    await authenticator.write_uses()
    first = await connection.fetchval(query)
    assert first is not None
    assert await status(closed, key.text) == 200
    await authenticator.write_uses()
    assert await connection.fetchval(query) == first
    await connection.execute("UPDATE api_keys SET last_used_at = now() - interval '61 s'")
    assert await status(closed, key.text) == 200
    await authenticator.write_uses()
    assert await connection.fetchval(query) >= first


async def test_the_last_use_is_written_while_the_service_runs(
    guarded: Settings, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.auth.authenticator._USE_PERIOD_SECONDS", 0.1)
    async with run_service(guarded, with_worker=False) as service:
        key = await service.services.tokens.create("red")
        assert await status(service, key.text) == 200
        await until(lambda: connection.fetchval("SELECT last_used_at FROM api_keys"))


async def test_a_known_token_costs_no_query(
    closed: Service, connection: asyncpg.Connection
) -> None:
    key, unknown = await closed.services.tokens.create("red"), new_key()
    tokens = {key.text: 200, sign(CLAIMS): 200, unknown.text: 401}
    for text, expected in tokens.items():
        assert await status(closed, text, "/nothing") == (404 if expected == 200 else 401)
    # A query for a token now waits until the test is over.
    async with connection.transaction():
        await connection.execute("LOCK TABLE api_keys, revoked_tokens IN ACCESS EXCLUSIVE MODE")
        for text, expected in tokens.items():
            assert await status(closed, text, "/nothing") == (404 if expected == 200 else 401)


# --- revocation -------------------------------------------------------------------------------------


async def test_a_revocation_notifies_every_process(
    guarded: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is forgotten by time here: only the notification ends what is remembered."""
    monkeypatch.setattr("app.auth.authenticator._CACHE_TTL_SECONDS", FOREVER)
    async with (
        run_service(guarded, with_worker=False) as one,
        run_service(guarded, with_worker=False) as other,
    ):
        tokens = one.services.tokens
        key, kept = await tokens.create("red"), await tokens.create("red")
        token, same_id = sign(CLAIMS), sign(CLAIMS | {"team_id": "blue"})
        for service in (one, other):
            for text in (key.text, kept.text, token, same_id):
                assert await status(service, text) == 200
        await tokens.revoke(None, key.prefix)
        await tokens.revoke_token("red", "t1")
        for service in (one, other):
            for text in (key.text, token, sign(CLAIMS | {"x": 1})):
                await until(lambda s=service, t=text: is_refused(s, t))  # type: ignore[misc]
            for text in (kept.text, same_id):
                assert await status(service, text) == 200
        answer = await other.client.get("/results/", headers=bearer(key.text))
        assert "revoked" in assert_problem(answer, 401, "invalid_token")["detail"]


async def test_without_a_notification_it_holds_when_the_answer_is_old(
    closed: Service, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert authenticator._CACHE_TTL_SECONDS <= 10
    monkeypatch.setattr("app.auth.authenticator._CACHE_TTL_SECONDS", 0.5)
    key, token = await closed.services.tokens.create("red"), sign(CLAIMS)
    assert await status(closed, key.text) == await status(closed, token) == 200
    # As if the notification was lost.
    await connection.execute("UPDATE api_keys SET revoked_at = now()")
    await connection.execute("INSERT INTO revoked_tokens VALUES ('red', 't1')")
    await until(lambda: is_refused(closed, key.text))
    await until(lambda: is_refused(closed, token))


@pytest.mark.trial
async def test_a_listener_that_comes_back_asks_again(
    closed: Service, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.auth.authenticator._CACHE_TTL_SECONDS", FOREVER)
    key = await closed.services.tokens.create("red")
    assert await status(closed, key.text) == 200
    await connection.execute("UPDATE api_keys SET revoked_at = now()")  # with no notification
    assert await status(closed, key.text) == 200

    async def cut() -> bool:
        return bool(
            await connection.fetchval(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                "WHERE query IN ('SELECT ''listening''') AND datname = current_database()"
            )
        )

    await until(cut)
    await until(lambda: is_refused(closed, key.text))


async def test_a_verdict_that_a_revocation_overtook_is_not_cached(
    guarded: Settings,
    closed: Service,
    connection: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.auth.authenticator._CACHE_TTL_SECONDS", FOREVER)
    tokens = TokenStore(closed.services.database, guarded)
    authenticator = Authenticator(tokens, guarded)
    key = await tokens.create("red")
    header = [(b"authorization", f"Bearer {key.text}".encode())]
    async with connection.transaction():
        await connection.execute("LOCK TABLE api_keys IN ACCESS EXCLUSIVE MODE")
        asking = asyncio.create_task(authenticator.authenticate(header))

        async def is_waiting() -> Any:
            return await connection.fetchval(
                "SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'api_keys'::regclass"
            )

        await until(is_waiting)
        authenticator.clear_cache()
    assert (await asking).team_id == "red"  # it came before
    await connection.execute("UPDATE api_keys SET revoked_at = now()")
    with pytest.raises(InvalidTokenError):
        await authenticator.authenticate(header)


async def test_guesses_evict_no_accepted_token(
    closed: Service, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.auth.authenticator._MAX_CACHED", 10)
    key = await closed.services.tokens.create("red")
    assert await status(closed, key.text, "/nothing") == 404
    answers = await asyncio.gather(*(status(closed, new_key().text) for _ in range(100)))
    assert set(answers) <= {401, 429}
    assert len(closed.services.authenticator._refused._verdicts) == 10
    async with connection.transaction():
        await connection.execute("LOCK TABLE api_keys IN ACCESS EXCLUSIVE MODE")
        assert await status(closed, key.text, "/nothing") == 404


@pytest.mark.trial
async def test_without_a_database_what_is_known_goes_on(
    closed: Service, connection: asyncpg.Connection
) -> None:
    """A token that cannot be judged is 503, never 401: the client must not give it up."""
    key, new = [await closed.services.tokens.create("red") for _ in range(2)]
    assert await status(closed, key.text, "/nothing") == 404
    async with connection.transaction():
        await connection.execute("LOCK TABLE api_keys IN ACCESS EXCLUSIVE MODE")
        closed.services.tokens._keys._retry_seconds = 0.2
        closed.services.database._timeout = 0.2
        asking = asyncio.create_task(closed.client.get("/results/", headers=bearer(new.text)))
        assert await status(closed, key.text, "/nothing") == 404
        assert_problem(await asking, 503, "database_unavailable")


async def test_revoking_what_is_not_there(closed: Service) -> None:
    with pytest.raises(NotFoundError):
        await closed.services.tokens.revoke(None, "llm_0123456789ab")
    await closed.services.tokens.revoke_token("red", "unseen")
    await closed.services.tokens.revoke_token("red", "unseen")
    assert await is_refused(closed, sign({"team_id": "red", "token_id": "unseen"}))


async def test_a_stranger_receives_no_model_names(closed: Service) -> None:
    key = await closed.services.tokens.create("red")
    for model in ("nobody", "scripted"):
        answer = await closed.client.get(f"/info?model={model}")
        assert answer.status_code == 401
        assert "scripted" not in answer.text
    assert await status(closed, key.text, "/info?model=scripted") == 200
    assert await status(closed, key.text, "/info?model=nobody") == 404


@pytest.mark.parametrize("value", ["1" + "0" * 400, "NaN", "true"], ids=["huge", "nan", "bool"])
async def test_a_time_that_is_none_is_refused_in_each_dialects_way(
    closed: Service, value: str
) -> None:
    claims = json.dumps(CLAIMS)[:-1] + f', "exp": {value}}}'
    headers = bearer(raw({"alg": "HS256"}, claims.encode()))
    for method, path in (
        ("GET", "/results/"),
        ("GET", "/v1/models"),
        ("POST", "/v1/messages"),
        ("POST", "/generate"),
        ("POST", "/tgi-v0/generate"),
        ("POST", "/inference/scripted"),
    ):
        answer = await closed.client.request(method, path, headers=headers)
        assert_refusal(path, answer, 401, "invalid_token")


async def test_times_that_are_times_are_good(closed: Service) -> None:
    now = time.time()
    for claims in (
        {"exp": now + 60.5}, {"exp": 2**53}, {"exp": int(now) + 60, "nbf": 0, "iat": 0.5},
    ):  # fmt: skip
        assert await status(closed, sign(CLAIMS | claims)) == 200


# --- wrong tokens -----------------------------------------------------------------------------------


async def test_an_address_with_many_wrong_tokens_must_wait_and_good_ones_pass(
    closed: Service,
) -> None:
    most = Settings.model_fields["auth_failures_per_minute"].default
    expired = new_key().text
    assert await status(closed, expired) == 401
    answers = [await status(closed, new_key().text) for _ in range(3 * most)]
    assert answers[: most - 1] == [401] * (most - 1)
    assert 429 in answers
    key, jwt = await closed.services.tokens.create("red"), sign(CLAIMS)
    for _ in range(most):
        guess = await closed.client.get("/results/", headers=bearer(new_key().text))
        if guess.status_code == 429:  # else one try had come back meanwhile
            assert_problem(guess, 429, "too_many_failed_attempts")
            assert int(guess.headers["retry-after"]) >= 1
        # Never seen before, from the same address:
        assert (await status(closed, key.text), await status(closed, jwt)) == (200, 200)
        # A program that repeats one old token has failed once.
        assert await status(closed, expired) == 401
    other = httpx.ASGITransport(app=closed.app, client=("203.0.113.9", 1))
    async with httpx.AsyncClient(transport=other, base_url="http://localhost") as client:
        guess = await client.get("/results/", headers=bearer(new_key().text))
        assert guess.status_code == 401


async def test_dialects_report_too_many_tokens(guarded: Settings) -> None:
    few = guarded.model_copy(update={"auth_failures_per_minute": 1})
    async with run_service(few, with_worker=False) as service:
        assert await status(service, new_key().text) == 401

        paths = ("/v1/chat/completions", "/v1/messages", "/generate", "/inference", "/results/")
        for path in paths:

            async def shown(path: str = path) -> httpx.Response | None:
                answer = await service.client.post(path, json={}, headers=bearer(new_key().text))
                return answer if answer.status_code == 429 else None

            answer = await until(shown)
            assert_refusal(path, answer, 429, "too_many_failed_attempts")
            assert answer.headers["retry-after"]


async def test_the_page_is_not_blamed_for_its_visitors(guarded: Settings) -> None:
    few = guarded.model_copy(update={"auth_failures_per_minute": 2})
    async with serve(few) as service, contextlib.AsyncExitStack() as stack:
        page = create_ui(UiSettings.model_validate({"api_url": str(service.client.base_url)}))
        await stack.enter_async_context(page.router.lifespan_context(page))
        guesser, neighbour = [
            await stack.enter_async_context(
                httpx.AsyncClient(
                    transport=httpx.ASGITransport(page, client=(address, 1)),
                    base_url="http://localhost",
                )
            )
            for address in ("203.0.113.7", "203.0.113.8")
        ]

        async def is_slowed() -> bool:
            answer = await guesser.post("/sign-in", data={"token": new_key().text})
            return answer.status_code == 429 and "retry-after" in answer.headers

        await until(is_slowed)
        form = {"token": new_key().text}
        assert (await neighbour.post("/sign-in", data=form)).status_code == 401
        assert (await guesser.post("/sign-in", data={"token": sign(CLAIMS)})).status_code == 303
