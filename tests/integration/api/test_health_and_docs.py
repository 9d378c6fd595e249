"""/health, /docs and the OpenAPI document."""

import re
from typing import Any

import pytest

from app.api.errors import anthropic_errors, openai_errors, tenstorrent_errors, tgi_errors
from app.core.errors import ResultFailedError, ServiceError
from app.core.settings import Settings
from tests.conftest import Service, make_settings, run_service
from tests.integration.support import assert_problem, serve
from tests.postgres import PostgresServer

ROUTES = {
    "/contexts/": {"post", "get"},
    "/contexts/{context_id}": {"get", "delete"},
    "/models/": {"get"},
    "/models/{name}": {"get"},
    "/models/{name}/load": {"post"},
    "/models/{name}/unload": {"post"},
    "/servers": {"get", "post"},
    "/servers/{name}": {"get", "delete"},
    "/servers/{name}/drain": {"post"},
    "/servers/{name}/resume": {"post"},
    "/models/send/{model_name}/{context_id}": {"post"},
    "/results/": {"post", "get"},
    "/results/cancel": {"post"},
    "/results/export": {"get"},
    "/results/{result_id}": {"get", "delete"},
    "/results/{result_id}/attempts": {"get"},
    "/results/{result_id}/stream": {"get"},
    "/results/{result_id}/stream-ticket": {"post"},
    "/results/{result_id}/cancel": {"post"},
    "/me": {"get"},
    "/history": {"get"},
    "/system": {"get"},
    "/usage": {"get"},
    "/usage/budgets": {"get"},
    "/jobs": {"post", "get"},
    "/jobs/{job_id}": {"get", "delete"},
    "/jobs/{job_id}/cancel": {"post"},
    "/jobs/{job_id}/close": {"post"},
    "/jobs/{job_id}/open": {"post"},
    "/jobs/{job_id}/results": {"get"},
    "/jobs/{job_id}/retry": {"post"},
    "/jobs/{job_id}/rows": {"post"},
    "/launches": {"post", "get"},
    "/launches/catalogue": {"get"},
    "/launches/engine-options": {"get"},
    "/launches/profiles": {"get"},
    "/launches/plan": {"post"},
    "/launches/downloads": {"post", "get"},
    "/launches/downloads/{download_id}": {"get"},
    "/launches/downloads/{download_id}/cancel": {"post"},
    "/launches/{launch_id}": {"get", "delete"},
    "/launches/{launch_id}/log": {"get"},
    "/launches/{launch_id}/stop": {"post"},
    "/webhooks/deliveries": {"get"},
    "/webhooks/deliveries/{delivery_id}/redeliver": {"post"},
    "/webhooks/secret": {"get", "post"},
    "/results/{result_id}/retry": {"post"},
    "/": {"post", "get"},
    "/generate": {"post"},
    "/generate_stream": {"post"},
    "/tgi-v0/generate": {"post"},
    "/tokenize": {"post"},
    "/chat_tokenize": {"post"},
    "/info": {"get"},
    "/ping": {"get"},
    "/inference": {"post"},
    "/inference/{model}": {"post"},
    "/v1/chat/completions": {"post"},
    "/v1/completions": {"post"},
    "/v1/embeddings": {"post"},
    "/v1/rerank": {"post"},
    "/v2/rerank": {"post"},
    "/rerank": {"post"},
    "/v1/score": {"post"},
    "/score": {"post"},
    "/embed": {"post"},
    "/v1/models": {"get"},
    "/v1/models/{model}": {"get"},
    "/v1/responses": {"post"},
    "/v1/responses/{response_id}": {"get", "delete"},
    "/v1/responses/{response_id}/input_items": {"get"},
    "/v1/responses/{response_id}/cancel": {"post"},
    "/v1/messages": {"post"},
    "/v1/messages/count_tokens": {"post"},
    "/v1/messages/batches": {"post", "get"},
    "/v1/messages/batches/{message_batch_id}": {"get", "delete"},
    "/v1/messages/batches/{message_batch_id}/cancel": {"post"},
    "/v1/messages/batches/{message_batch_id}/results": {"get"},
    "/v1/files": {"post", "get"},
    "/v1/files/{file_id}": {"get", "delete"},
    "/v1/files/{file_id}/content": {"get"},
    "/v1/batches": {"post", "get"},
    "/v1/batches/{batch_id}": {"get"},
    "/v1/batches/{batch_id}/cancel": {"post"},
    "/indexes": {"get"},
    "/{index}/find": {"post"},
    "/{index}/find_cnf": {"post"},
    "/{index}/count": {"post"},
    "/{index}/count_cnf": {"post"},
    "/{index}/prob": {"post"},
    "/{index}/ntd": {"post"},
    "/{index}/infgram_prob": {"post"},
    "/{index}/infgram_ntd": {"post"},
    "/{index}/get_document_by_rank": {"post"},
    "/{index}/get_document_by_pointer": {"post"},
    "/{index}/get_document_by_index": {"post"},
    "/{index}/get_documents_by_index": {"post"},
    "/{index}/documents/": {"get"},
    "/{index}/attribution": {"post"},
    "/results/{result_id}/attribution": {"get", "post"},
    "/health": {"get"},
    "/health/live": {"get"},
    "/health/ready": {"get"},
    "/metrics": {"get"},
}


NEED_A_TOKENIZER = {"/tokenize", "/chat_tokenize"}  # the scripted model has none


@pytest.fixture
async def document(api: Service) -> dict[str, Any]:
    answer = await api.client.get("/openapi.json")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


async def test_health(api: Service) -> None:
    for path in ("/health", "/health/live"):
        answer = await api.client.get(path)
        assert (answer.status_code, answer.content) == (200, b"")
    ready = await api.client.get("/health/ready")
    assert ready.status_code == 200
    parts = ready.json()
    assert (parts["database"], parts["triton"], parts["models_ready"]) == ("ok", "ok", ["scripted"])


async def test_head_answers_as_get_without_the_body(settings: Settings) -> None:
    """As monitors and load balancers ask."""
    async with serve(settings, with_worker=False) as service:
        for path in ("/health", "/health/live", "/health/ready", "/", "/ping", "/v1/models"):
            answer = await service.client.head(path)
            got = await service.client.get(path)
            assert (answer.status_code, answer.content) == (200, b""), path
            for name in ("content-length", "content-type"):
                assert answer.headers.get(name) == got.headers.get(name), path


@pytest.mark.trial
async def test_without_a_database_everything_says_so(
    postgres_server: PostgresServer, database_name: str
) -> None:
    nowhere = make_settings(
        postgres_server,
        database_name,
        database_host="127.0.0.1:1",
        triton_grpc="127.0.0.1:1",
        database_timeout_seconds=0.3,
    )
    async with run_service(nowhere, with_worker=False) as service:
        assert (await service.client.get("/health/live")).status_code == 200
        context = "/contexts/01890000-0000-7000-8000-000000000000"
        for method, path, body in (
            ("GET", "/health/ready", None),
            ("GET", "/results/", None),
            ("GET", "/contexts/", None),
            ("GET", context, None),
            ("DELETE", context, None),
            ("GET", context.replace("contexts", "results"), None),
            ("POST", context.replace("contexts", "results") + "/cancel", None),
            ("POST", "/contexts/", {"content": "x"}),
            ("GET", "/models/", None),
        ):
            answer = await service.client.request(method, path, json=body)
            assert_problem(answer, 503, "database_unavailable")
            assert int(answer.headers["retry-after"]) > 0


@pytest.mark.trial
async def test_the_documentation_page_needs_no_other_host(api: Service) -> None:
    page = await api.client.get("/docs")
    assert page.status_code == 200
    assets = re.findall(r"""(?:src|href)=["']([^"']+)["']|url:\s*'([^']+)'""", page.text)
    paths = [first or second for first, second in assets]
    assert len(paths) >= 3
    assert not [path for path in paths if "//" in path], paths
    assert not re.findall(r"https?://", page.text)
    for path in paths:
        asset = await api.client.get(path)
        assert asset.status_code == 200, path
        assert asset.content
    style = next(path for path in paths if path.endswith(".css"))
    assert not re.findall(r"url\(https?:", (await api.client.get(style)).text)


async def test_the_document_names_every_route(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    described = {path: set(methods) for path, methods in document["paths"].items()}
    assert described == ROUTES


@pytest.mark.trial
async def test_the_document_is_whole(document: dict[str, Any]) -> None:
    """Each reference leads somewhere, each operation has its id, words and path parameters."""
    references = set(re.findall(r"'\$ref': '([^']+)'", str(document)))
    assert references
    for reference in references:
        target: Any = document
        for part in reference.removeprefix("#/").split("/"):
            assert part in target, reference
            target = target[part]
    identifiers = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            identifiers.append(operation["operationId"])
            assert operation["summary"], (method, path)
            assert operation["description"], (method, path)
            named = {p["name"] for p in operation.get("parameters", []) if p["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)}", path)), (method, path)
            assert all(p["required"] for p in operation.get("parameters", []) if p["in"] == "path")
            assert any(code.startswith("2") for code in operation["responses"])
            for code, answer in operation["responses"].items():
                assert re.fullmatch(r"[1-5](\d\d|XX)|default", code)
                assert answer["description"] is not None
    assert len(identifiers) == len(set(identifiers))


@pytest.mark.trial
async def test_bodies_have_examples_that_are_accepted(
    service: Service, document: dict[str, Any]
) -> None:
    seen = 0
    client = service.client
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if "requestBody" not in operation or path.startswith(
                ("/v1/", "/{index}/", "/results/{result_id}/attribution")
            ):
                continue  # those of dialects wait for their results: tested with them
            if operation["tags"] == ["embeddings"]:
                continue  # needs a pooling model: test_reranking.py
            if path in ("/launches", "/launches/downloads"):
                continue  # need a place: test_launches_local.py, test_downloads_api.py
            media = operation["requestBody"]["content"]["application/json"]
            examples = (
                [media["example"]]
                if "example" in media
                else [example["value"] for example in media["examples"].values()]
            )
            for example in examples:
                seen += 1
                body = example
                if isinstance(body, dict) and "model" in body:
                    body = body | {"model": "scripted"}
                context = await client.post("/contexts/", json={"content": "x"})
                names = {"model_name": "scripted", "model": "scripted"}
                job = await client.post("/jobs", json={})
                names |= {"context_id": context.json()["id"], "job_id": job.json()["id"]}
                url = path.format(**names)
                answer = await client.request(method, url, json=body)
                if path in NEED_A_TOKENIZER:
                    assert re.search("tokenizer|chat template", answer.json()["error"])
                else:
                    documented = [code for code in operation["responses"] if code[0] == "2"]
                    assert str(answer.status_code) in documented, (path, answer.text)
    assert seen >= 3


@pytest.mark.trial
async def test_every_operation_documents_its_refusals(document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        segment = path.split("/")[1]
        for method, operation in methods.items():
            described = operation["responses"]["default"]["content"]
            if segment in tgi_errors.SEGMENTS:
                assert described["application/json"]["schema"] == tgi_errors.SCHEMA
            elif segment == tgi_errors.FIRST_SEGMENT:
                assert described["application/json"]["schema"] == tgi_errors.FIRST_SCHEMA
            elif segment == tenstorrent_errors.SEGMENT:
                assert described["application/json"]["schema"] == tenstorrent_errors.SCHEMA
            elif path.startswith(anthropic_errors.PATH):
                schema = described["application/json"]["schema"]
                assert schema == anthropic_errors.SCHEMA
            elif path.startswith(anthropic_errors.MODELS):
                schema = described["application/json"]["schema"]
                assert anthropic_errors.SCHEMA in schema["anyOf"]
                assert "OpenAIErrorRead" in str(schema["anyOf"])
            elif segment in ("v1", *openai_errors.SEGMENTS):
                assert "OpenAIErrorRead" in str(described), (method, path)
            else:
                assert "application/problem+json" in described, (method, path)


async def test_the_default_422_of_the_framework_is_nowhere(document: dict[str, Any]) -> None:
    assert "HTTPValidationError" not in str(document)


def test_every_error_has_its_own_code() -> None:
    def family(kind: type[ServiceError]) -> list[type[ServiceError]]:
        return [kind, *(k for child in kind.__subclasses__() for k in family(child))]

    # One kind lists the codes of results.
    kinds = [kind for kind in family(ServiceError)[1:] if kind is not ResultFailedError]
    codes = [kind.code for kind in kinds]
    assert len(codes) == len(set(codes))
    assert all(400 <= kind.status < 600 and kind.title for kind in kinds)
