"""One team never sees, counts, changes or guesses another's rows: every route of the document.

A new route fails here until it is listed with the rows it names: a path parameter in ROWS or
PUBLIC, a body in BODIES, and, if it takes no ids at all, a line in WITHOUT_IDS.
"""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import httpx
import orjson
import pytest

from app.api.admin.plan_schemas import EXAMPLE as PLAN_EXAMPLE
from app.core.ids import new_id
from app.core.settings import Settings
from tests.conftest import Service, run_service
from tests.integration.auth.test_auth import bearer, guarded
from tests.integration.support import assert_anthropic_error, assert_openai_error, assert_problem
from tests.unit.auth.test_jwt import sign

__all__ = ["guarded"]

RED = bearer(sign({"team_id": "red", "token_id": "r", "scopes": ["use", "operate"]}))
BLUE = bearer(sign({"team_id": "blue", "token_id": "b", "scopes": ["use", "operate"]}))
MARK = "red-and-nobody-elses"
ID = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}")

# Path parameters that name a row of a team: the field of `Rows` that holds red's.
ROWS = {
    "context_id": "context",
    "result_id": "pending",
    "delivery_id": "delivery",
    "response_id": "response",
    "file_id": "file",
    "batch_id": "batch",
    "message_batch_id": "message_batch",
    "launch_id": "launch",
    "download_id": "download",
    "job_id": "job",
}
# Those that name no team's rows, with a value that exists.
PUBLIC = {"name": "scripted", "model_name": "scripted", "model": "scripted", "index": "corpus"}
# Bodies by method and path; {} is sent to the others with path parameters, none to those without.
BODIES: dict[str, Any] = {"post /launches/plan": PLAN_EXAMPLE}
# Routes that take no id in their path: what blue receives of red's rows.
NOTHING, EMPTY_LIST, OWN = "no team's rows", "an empty list", "only what it has made itself"
FLEET = "the servers, which are no team's: for operators alone (test_auth.py)"
INDEX = "what an index holds, which is no team's: the same to all (test_infini_gram.py)"
WITHOUT_IDS = {
    "get /health": NOTHING,
    "get /health/live": NOTHING,
    "get /health/ready": NOTHING,
    "get /": NOTHING,
    "get /ping": NOTHING,
    "get /info": NOTHING,
    "get /models/": NOTHING,  # queued and running counts are per model, of all teams together
    "get /models/{name}": NOTHING,
    "post /models/{name}/unload": NOTHING,
    "post /models/{name}/load": NOTHING,  # after the unloading: other tests need the model
    "get /servers": FLEET,
    "post /servers": FLEET,
    "get /servers/{name}": FLEET,
    "delete /servers/{name}": FLEET,
    "post /servers/{name}/drain": FLEET,
    "post /servers/{name}/resume": FLEET,
    "get /v1/models": NOTHING,
    "get /v1/models/{model}": NOTHING,
    "get /indexes": NOTHING,
    "post /{index}/find": INDEX,
    "post /{index}/find_cnf": INDEX,
    "post /{index}/count": INDEX,
    "post /{index}/count_cnf": INDEX,
    "post /{index}/prob": INDEX,
    "post /{index}/ntd": INDEX,
    "post /{index}/infgram_prob": INDEX,
    "post /{index}/infgram_ntd": INDEX,
    "post /{index}/get_document_by_rank": INDEX,
    "post /{index}/get_document_by_pointer": INDEX,
    "post /{index}/get_document_by_index": INDEX,
    "post /{index}/get_documents_by_index": INDEX,
    "get /{index}/documents/": INDEX,
    "post /{index}/attribution": OWN,  # test_attributions.py
    "get /me": OWN,  # test_auth.py
    "get /history": EMPTY_LIST,
    "get /usage": NOTHING,  # test_usage_api.py
    "get /usage/budgets": EMPTY_LIST,
    "get /system": NOTHING,  # totals of all teams, for operators alone
    "get /metrics": NOTHING,  # so are these
    "get /launches/catalogue": NOTHING,
    "get /launches/engine-options": NOTHING,
    "get /launches/profiles": NOTHING,
    "post /launches/plan": NOTHING,
    "get /launches": EMPTY_LIST,
    "post /launches": OWN,  # test_launches_local.py
    "get /launches/downloads": EMPTY_LIST,
    "post /launches/downloads": OWN,  # test_downloads_api.py
    "get /contexts/": EMPTY_LIST,
    "get /results/": EMPTY_LIST,
    "get /results/export": NOTHING,
    "get /webhooks/deliveries": EMPTY_LIST,
    "get /jobs": EMPTY_LIST,
    "post /jobs": OWN,  # test_jobs_api.py
    "post /contexts/": OWN,
    "post /results/": OWN,
    "post /results/cancel": OWN,
    "post /v1/completions": OWN,
    "post /v1/chat/completions": OWN,
    **dict.fromkeys(
        (
            "post /v1/embeddings",  # test_embeddings.py, as are these
            *("post /rerank", "post /v1/rerank", "post /v2/rerank"),
            *("post /score", "post /v1/score", "post /embed"),
        ),
        OWN,
    ),
    "post /v1/responses": OWN,
    "post /v1/messages": OWN,
    "post /v1/messages/count_tokens": OWN,  # stores nothing
    "post /v1/messages/batches": OWN,
    "get /v1/messages/batches": EMPTY_LIST,
    "post /v1/files": OWN,
    "post /v1/batches": OWN,
    "get /v1/files": EMPTY_LIST,
    "get /v1/batches": EMPTY_LIST,
    "post /": OWN,
    "post /generate": OWN,
    "post /generate_stream": OWN,
    "post /tgi-v0/generate": OWN,
    "post /tokenize": OWN,
    "post /chat_tokenize": OWN,
    "post /inference": OWN,
    "post /inference/{model}": OWN,
    "get /webhooks/secret": OWN,
    "post /webhooks/secret": OWN,
}

SNAPSHOT = """
SELECT to_jsonb(c)::text FROM contexts c WHERE team_id = 'red'
UNION ALL SELECT to_jsonb(r)::text FROM results r WHERE team_id = 'red'
UNION ALL SELECT to_jsonb(d)::text FROM webhook_deliveries d WHERE team_id = 'red'
UNION ALL SELECT to_jsonb(s)::text FROM webhook_secrets s WHERE team_id = 'red'
UNION ALL SELECT to_jsonb(k)::text FROM idempotency_keys k WHERE team_id = 'red'
UNION ALL SELECT to_jsonb(t)::text FROM stream_tickets t WHERE team_id = 'red'
UNION ALL SELECT to_jsonb(f)::text FROM files f WHERE team_id = 'red'
UNION ALL SELECT to_jsonb(b)::text FROM batches b WHERE team_id = 'red'
UNION ALL SELECT to_jsonb(l)::text FROM launches l WHERE team_id = 'red'
UNION ALL SELECT to_jsonb(d)::text FROM model_downloads d WHERE team_id = 'red'
UNION ALL SELECT to_jsonb(j)::text FROM jobs j WHERE team_id = 'red'
UNION ALL SELECT to_jsonb(r)::text FROM job_rows r JOIN jobs j ON j.id = r.job_id WHERE j.team_id = 'red'
ORDER BY 1
"""


@dataclass
class Rows:
    """Ids of red's rows, and everything that blue must never be shown."""

    context: str
    pending: str
    delivery: str
    secret: str
    ticket: str
    response: str
    file: str
    batch: str
    launch: str
    download: str
    job: str
    message_batch: str
    marks: list[str] = field(default_factory=list)

    def assert_unseen(self, answer: httpx.Response, reported: str = "") -> None:
        """No response contains a mark of red's, except those that blue sent itself."""
        text = answer.text + str(answer.headers)
        for mark in self.marks:
            assert mark in reported or mark not in text, (answer.request.url, mark, answer.text)


@pytest.fixture
async def both(guarded: Settings) -> AsyncIterator[Service]:
    """An API for teams, without a worker."""
    settings = guarded.model_copy(update={"webhook_allow_private": True})
    async with run_service(settings, with_worker=False) as service:
        yield service


@pytest.fixture
async def red(both: Service, connection: asyncpg.Connection) -> Rows:
    """One of everything, with the mark wherever text can stand."""

    async def post(path: str, body: object = None, status: int = 202) -> Any:
        answer = await both.client.post(path, json=body, headers=RED)
        assert answer.status_code == status, answer.text
        return answer.json()

    context = await post("/contexts/", {"content": MARK, "metadata": {"x": MARK}}, 201)
    members = {
        "model": "scripted",
        "metadata": {"x": MARK},
        "webhook_url": f"http://[::1]:9/{MARK}",
    }
    pending = await post(
        "/results/", members | {"context_id": context["id"], "idempotency_key": "same"}
    )
    ended = await post("/results/", members | {"content": MARK})
    await post(f"/results/{ended['id']}/cancel", status=200)
    secret = await both.client.get("/webhooks/secret", headers=RED)
    ticket = await post(f"/results/{pending['id']}/stream-ticket", status=201)
    response = await post(
        "/v1/responses", {"model": "scripted", "input": MARK, "background": True}, 200
    )
    line = orjson.dumps({"custom_id": MARK, "method": "POST", "url": "/v1/completions", "body": {}})
    uploaded = await both.client.post(
        "/v1/files", files={"file": (MARK, line)}, data={"purpose": "batch"}, headers=RED
    )
    assert uploaded.status_code == 200, uploaded.text
    file = uploaded.json()["id"]
    batch = await post(
        "/v1/batches",
        {
            "input_file_id": file,
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            "metadata": {"x": MARK},
        },
        200,
    )
    params = {"model": "scripted", "max_tokens": 1, "messages": [{"role": "user", "content": MARK}]}
    requests = [{"custom_id": MARK, "params": params}]
    message_batch = await post("/v1/messages/batches", {"requests": requests}, 200)
    job = await post("/jobs", {"name": MARK, "key": MARK, "metadata": {"x": MARK}}, 201)
    row = {"context_id": context["id"], "job_id": job["id"], "job_key": MARK}
    await post("/results/", members | row)
    rows = Rows(
        context["id"], pending["id"], ended["id"], secret.json()["secret"], ticket["ticket"],
        response["id"], file, batch["id"], str(new_id()), str(new_id()), job["id"],
        message_batch["id"],
    )  # fmt: skip
    rows.marks = [
        MARK, rows.context, rows.pending, rows.delivery, ended["context_id"], rows.secret,
        rows.ticket, rows.response, rows.file, rows.batch, rows.launch, rows.download,
        rows.job,
        rows.message_batch,
    ]  # fmt: skip
    # No profile is configured: the existing launch is enough.
    await connection.execute(
        """INSERT INTO launches (id, team_id, name, provider, profile, model, spec, reason)
           VALUES ($1, 'red', $2::varchar, 'slurm', $2::varchar, $2::varchar, $3, $2::varchar)""",
        rows.launch, MARK, orjson.dumps({"served_name": MARK}).decode(),
    )  # fmt: skip
    await connection.execute(
        """INSERT INTO model_downloads (id, team_id, profile, model, revision, reason)
           VALUES ($1, 'red', $2::varchar, $2::varchar, $2::varchar, $2::varchar)""",
        rows.download, MARK,
    )  # fmt: skip
    # They are there, for red.
    for path in (
        "/contexts/",
        "/results/",
        "/webhooks/deliveries",
        "/v1/files",
        "/v1/batches",
        "/launches",
        "/launches/downloads",
        "/jobs",
    ):
        listed = await both.client.get(path, headers=RED)
        assert MARK in listed.text, path
    return rows


def not_found(answer: httpx.Response) -> str:
    """The detail of a 404, in the shape of its path's dialect."""
    if answer.request.url.path.startswith("/v1/messages/"):
        return str(assert_anthropic_error(answer, 404, "not_found")["message"])
    if answer.request.url.path.startswith("/v1/"):
        return str(assert_openai_error(answer, 404)["message"])
    return str(assert_problem(answer, 404, "not_found")["detail"])


async def operations(service: Service) -> list[tuple[str, str, dict[str, Any]]]:
    document = (await service.client.get("/openapi.json")).json()
    return [
        (method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


@pytest.mark.trial
async def test_every_route_with_another_teams_ids(
    both: Service, red: Rows, connection: asyncpg.Connection
) -> None:
    before = [row[0] for row in await connection.fetch(SNAPSHOT)]
    assert len(before) == 19
    walked = 0
    for method, path, operation in await operations(both):
        names = re.findall(r"{(\w+)}", path)
        unknown = set(names) - ROWS.keys() - PUBLIC.keys()
        assert not unknown, f"{method} {path}: list in ROWS or PUBLIC what {unknown} names"
        if not set(names) & ROWS.keys():
            continue
        url = path
        for name in names:
            value = PUBLIC[name] if name in PUBLIC else getattr(red, ROWS[name])
            url = url.replace(f"{{{name}}}", value)
        body = BODIES.get(f"{method} {path}", {}) if "requestBody" in operation else None
        for query in ("", "?force=true", "?wait=1", "?partial=true&wait=0.1", "?full=true"):
            answer = await both.client.request(method, url + query, json=body, headers=BLUE)
            detail = not_found(answer)
            red.assert_unseen(answer, reported=url)
            # The same words as for what does not exist.
            nowhere = ID.sub("01890000-0000-7000-8000-000000000000", url)
            absent = await both.client.request(method, nowhere + query, json=body, headers=BLUE)
            assert ID.sub("ID", detail) == ID.sub("ID", not_found(absent))
            assert set(absent.headers) == set(answer.headers)
        walked += 1
    assert walked >= 10
    assert [row[0] for row in await connection.fetch(SNAPSHOT)] == before


@pytest.mark.trial
async def test_every_route_without_ids(
    both: Service, red: Rows, connection: asyncpg.Connection
) -> None:
    before = [row[0] for row in await connection.fetch(SNAPSHOT)]
    named = {
        f"{method} {path}"
        for method, path, _ in await operations(both)
        if not set(re.findall(r"{(\w+)}", path)) & ROWS.keys()
    }
    assert named == WITHOUT_IDS.keys(), "list in WITHOUT_IDS what a new route returns"
    for route, kind in WITHOUT_IDS.items():
        if kind in (OWN, INDEX, FLEET):
            continue  # each in a test below
        method, path = route.split()
        url = path.format(**PUBLIC)
        body = BODIES.get(route)
        answer = await both.client.request(method, url, headers=BLUE, json=body)
        assert answer.status_code == 200, (method, url, answer.text)
        red.assert_unseen(answer)
        if kind == EMPTY_LIST:
            listed = answer.json()
            assert (listed["data"] if path.startswith("/v1/") else listed) == []
    assert [row[0] for row in await connection.fetch(SNAPSHOT)] == before


async def test_lists_narrowed_to_another_teams_rows_are_empty(both: Service, red: Rows) -> None:
    for path in (
        f"/results/?context_id={red.context}", "/results/?state=pending", "/results/?state=failed",
        "/results/?error_code=cancelled", "/results/?retryable=false", "/results/?full=true",
        "/results/?model_name=scripted", f"/results/?after={red.delivery}",
        f"/results/?context_id={red.context}&state=pending&model_name=scripted",
        f"/contexts/?after={red.delivery}", f"/webhooks/deliveries?result_id={red.delivery}",
        "/webhooks/deliveries?state=pending",
    ):  # fmt: skip
        answer = await both.client.get(path, headers=BLUE)
        assert (answer.status_code, answer.json()) == (200, []), path


async def test_bodies_that_name_another_teams_context(
    both: Service, red: Rows, connection: asyncpg.Connection
) -> None:
    create = {"model": "scripted", "context_id": red.context}
    answer = await both.client.post("/results/", json=create, headers=BLUE)
    assert_problem(answer, 404, "not_found")
    red.assert_unseen(answer, reported=red.context)
    answer = await both.client.post("/results/", json=[create, create], headers=BLUE)
    assert answer.status_code == 202
    assert [item["code"] for item in answer.json()] == ["not_found"] * 2
    red.assert_unseen(answer, reported=red.context)
    assert await connection.fetchval("SELECT count(*) FROM results WHERE team_id = 'blue'") == 0


async def test_what_a_team_makes_is_its_own(both: Service, red: Rows) -> None:
    """The same idempotency key is another key, and the answer is no replay of red's."""
    answer = await both.client.post(
        "/results/",
        json={"model": "scripted", "content": "blue's"},
        headers=BLUE | {"Idempotency-Key": "same"},
    )
    assert answer.status_code == 202
    assert "idempotent-replayed" not in answer.headers
    red.assert_unseen(answer)
    made = await both.client.post("/contexts/", json={"content": "blue's"}, headers=BLUE)
    red.assert_unseen(made)
    for path, count in (("/results/", 1), ("/contexts/", 2)):
        listed = await both.client.get(path, headers=BLUE)
        assert len(listed.json()) == count
        red.assert_unseen(listed)


@pytest.mark.parametrize(
    ("path", "name"), [("/", "inputs"), ("/generate", "inputs"), ("/inference", "text")]
)
async def test_what_other_dialects_make_is_a_teams_own(
    guarded: Settings, path: str, name: str
) -> None:
    async with run_service(guarded, with_worker=True) as service:
        answers = []
        for headers in (RED, BLUE):
            same = headers | {"Idempotency-Key": "same"}
            body = {name: "hi {{chunks=2}}"}
            answers.append(await service.client.post(path, json=body, headers=same))
        ids = [answer.headers["x-result-id"] for answer in answers]
        assert len(set(ids)) == 2
        for headers, own, other in ((RED, ids[0], ids[1]), (BLUE, ids[1], ids[0])):
            seen = await service.client.get(f"/results/{own}", headers=headers)
            assert seen.json()["state"] == "completed"
            unseen = await service.client.get(f"/results/{other}", headers=headers)
            assert_problem(unseen, 404, "not_found")


async def test_bodies_that_name_another_teams_response_or_file(both: Service, red: Rows) -> None:
    for path, status, body in (
        (
            "/v1/responses",
            400,
            {"model": "scripted", "input": "x", "previous_response_id": red.response},
        ),
        (
            "/v1/batches",
            404,
            {
                "input_file_id": red.file,
                "endpoint": "/v1/completions",
                "completion_window": "24h",
            },
        ),
    ):
        answer = await both.client.post(path, json=body, headers=BLUE)
        assert answer.status_code == status, answer.text
        red.assert_unseen(answer, reported=str(body))


# Requests of blue to each dialect whose client waits for the answer.
SYNCHRONOUS: dict[str, Any] = {
    "/v1/completions": {"model": "scripted", "prompt": "{{chunks=1}}"},
    "/v1/chat/completions": {
        "model": "scripted",
        "messages": [{"role": "user", "content": "{{chunks=1}}"}],
    },
    "/v1/responses": {"model": "scripted", "input": "{{chunks=1}}"},
    "/v1/messages": {
        "model": "scripted",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "{{chunks=1}}"}],
    },
    "/generate": {"inputs": "{{chunks=1}}"},
    "/generate_stream": {"inputs": "{{chunks=1}}"},
    "/tgi-v0/generate": {"inputs": "{{chunks=1}}"},
    "/": {"inputs": "{{chunks=1}}"},
    "/inference": {"text": "{{chunks=1}}"},
    "/inference/scripted": {"text": "{{chunks=1}}"},
}


async def test_what_a_dialect_makes_is_its_callers(
    guarded: Settings, connection: asyncpg.Connection
) -> None:
    async with run_service(guarded, with_worker=True) as service:
        for count, (path, body) in enumerate(SYNCHRONOUS.items(), 1):
            answer = await service.client.post(path, json=body, headers=BLUE)
            assert answer.status_code == 200, (path, answer.text)
            made = await connection.fetch("SELECT team_id, state FROM results")
            assert [tuple(row) for row in made] == [("blue", "completed")] * count, path
            for one in ("/results/", "/contexts/"):
                assert len((await service.client.get(one, headers=BLUE)).json()) == count
                assert (await service.client.get(one, headers=RED)).json() == []
    sent = {f"post {path}".replace("/scripted", "/{model}") for path in SYNCHRONOUS}
    assert sent <= WITHOUT_IDS.keys()


async def test_cancelling_by_filter_reaches_no_other_team(both: Service, red: Rows) -> None:
    for query in (f"context_id={red.context}", "model_name=scripted"):
        answer = await both.client.post(f"/results/cancel?{query}", headers=BLUE)
        assert (answer.status_code, answer.json()) == (200, {"cancelled": 0})
    seen = await both.client.get(f"/results/{red.pending}", headers=RED)
    assert (seen.json()["state"], seen.json()["cancel_requested_at"]) == ("pending", None)


async def test_secrets_are_a_teams_own(both: Service, red: Rows) -> None:
    for method in ("GET", "POST", "POST"):
        answer = await both.client.request(method, "/webhooks/secret", headers=BLUE)
        assert answer.status_code == 200
        red.assert_unseen(answer)
    kept = await both.client.get("/webhooks/secret", headers=RED)
    assert kept.json()["secret"] == red.secret


async def test_a_ticket_opens_what_its_team_could(both: Service, red: Rows) -> None:
    made = await both.client.post(
        "/results/", json={"model": "scripted", "content": "blue's"}, headers=BLUE
    )
    path = f"/results/{made.json()['id']}"
    ticket = (await both.client.post(f"{path}/stream-ticket", headers=BLUE)).json()["ticket"]
    for headers in (BLUE, {}):
        answer = await both.client.get(
            f"/results/{red.pending}/stream", params={"ticket": ticket}, headers=headers
        )
        assert_problem(answer, 403, "bad_ticket")
        # Red's ticket opens red's result, not blue's.
        answer = await both.client.get(
            f"{path}/stream", params={"ticket": red.ticket}, headers=headers
        )
        assert_problem(answer, 403, "bad_ticket")
