"""Schemas, serializers, the OpenAPI document and the documents' samples have the same members.

A field that is missing in one of these places fails here, in seconds; test_openapi_document.py finds
the rest with a running service.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, get_args

import jsonschema
import orjson
import pytest
from pydantic import BaseModel

from app.api.app import create_app
from app.api.native.me import MeRead, me_to_wire
from app.api.native.schemas import (
    AttemptRead,
    ContextRead,
    ExportRead,
    ProblemRead,
    ResultRead,
)
from app.api.openai.batches_schemas import FileRead, file_to_wire
from app.api.openai.responses_output import ResponseRead, response_to_wire
from app.api.openai.responses_schemas import ResponseCreate
from app.api.openai.schemas import OpenAIRequest
from app.api.openai.stored_responses import StoredRequest
from app.api.output_rules import OutputRules
from app.auth.principal import ANYONE
from app.batches.files import File
from app.core.errors import ConflictError, invalid_field
from app.core.ids import new_id
from app.core.queue_names import queue_of
from app.core.settings import Settings
from app.inference.sampling import SamplingParameters
from app.queue.enqueue import NewResult
from app.results.contexts import Context
from app.results.requests import ResultCreate, SendOptions
from app.results.rows import AttemptsRow, ResultRow
from app.results.serialization import (
    accepted_to_wire,
    attempts_to_wire,
    context_to_wire,
    result_to_wire,
)
from tests.unit.core.test_settings import REQUIRED

ROOT = Path(__file__).resolve().parents[3]
SAMPLED = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HOST = r"(?:http://)?(?:127\.0\.0\.1|localhost):8887"

ENDED = datetime.now(UTC) + timedelta(seconds=1)
PENDING = ResultRow(
    id=new_id(), team_id="red", context_id=new_id(), model_name="demo", model_version=None,
    state="pending", output=None, error_code=None, error_message=None, error_retryable=None,
    finish_reason=None, parameters="{}", prompt_tokens=None, completion_tokens=None, attempt=0,
    cancel_requested_at=None, started_at=None, first_token_at=None, finished_at=None, metadata="{}",
    retry_of=None, logprobs=None, erased_at=None, store=True, request=None, kind="generation",
    source_id=None, attribution=None, text_attempt=None, continuations=0, prompt_logprobs=None,
    vector=None,
)  # fmt: skip
COMPLETED = PENDING._replace(
    state="completed", output="text", finish_reason="stop", prompt_tokens=1, completion_tokens=2,
    started_at=ENDED, first_token_at=ENDED, finished_at=ENDED, model_version=1, attempt=1,
)  # fmt: skip
FAILED = COMPLETED._replace(
    state="failed", error_code="cancelled", error_message="why", error_retryable=False
)
# With each member that only some results have.
WITH_ALL = COMPLETED._replace(
    kind="attribution", output="{}", logprobs="[]", prompt_logprobs="[]", erased_at=ENDED, source_id=new_id(), reused_from=new_id(),
    retry_of=new_id(), attribution=json.dumps({"queue": queue_of("demo"), "id": str(new_id())}),
)  # fmt: skip
# Lists with `prompts`, and those that cut a text.
ADDED_BY_ROUTES = {"prompt_start", "truncated"}


def to_json(wire: object) -> Any:
    return orjson.loads(orjson.dumps(wire))


def closed(schema: Any, *, partial: bool = False) -> Any:
    """A schema that forbids members it does not describe; with `partial` none is required."""
    if isinstance(schema, list):
        return [closed(one, partial=partial) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value, partial=partial) for key, value in schema.items()}
    if "properties" in schema and "additionalProperties" not in schema:
        found["additionalProperties"] = False
    if partial and isinstance(found.get("required"), list):
        del found["required"]
    return found


def check(model: type[BaseModel], wire: object, *, partial: bool = False) -> None:
    jsonschema.validate(wire, closed(model.model_json_schema(by_alias=True), partial=partial))


@cache
def document() -> dict[str, Any]:
    found: dict[str, Any] = create_app(Settings.model_validate(REQUIRED)).openapi()
    return found


def references(part: object) -> Iterator[str]:
    if isinstance(part, Mapping):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for value in part.values():
            yield from references(value)
    elif isinstance(part, list):
        for value in part:
            yield from references(value)


@pytest.mark.parametrize("row", [PENDING, COMPLETED, FAILED, WITH_ALL])
def test_results_have_the_members_of_their_schema(row: ResultRow) -> None:
    check(ResultRead, to_json(result_to_wire(row, model_ready=True)))


def test_every_member_of_a_result_is_written() -> None:
    written = result_to_wire(WITH_ALL, model_ready=True).keys() | ADDED_BY_ROUTES
    assert written == ResultRead.model_fields.keys()
    assert ExportRead.model_fields.keys() - ResultRead.model_fields.keys() == {
        "content",
        "messages",
    }


def test_an_accepted_result_has_the_members_of_a_pending_one() -> None:
    """The first is not read back."""
    members = PENDING._asdict()
    request = {one.name: members[one.name] for one in fields(NewResult) if one.name in members}
    accepted = accepted_to_wire(NewResult(**request, deadline_seconds=9.0), model_ready=True)
    row = result_to_wire(PENDING, model_ready=True)
    assert orjson.dumps(accepted) == orjson.dumps(row)


@pytest.mark.parametrize("erased_at", [None, ENDED])
def test_contexts(erased_at: datetime | None) -> None:
    context = Context(new_id(), "def ", None, {"a": 1}, erased_at)
    wire = to_json(context_to_wire(context))
    check(ContextRead, wire)
    assert wire.keys() | {"erased_at"} == ContextRead.model_fields.keys()


def test_attempts() -> None:
    row = AttemptsRow("[]", 1, "failed", new_id(), ENDED, ENDED, "cancelled", "why", None)
    (wire,) = to_json(attempts_to_wire(row))
    check(AttemptRead, wire)
    assert wire.keys() == AttemptRead.model_fields.keys()


def test_the_principal() -> None:
    wire = me_to_wire(ANYONE, is_authenticated=False)
    check(MeRead, to_json(wire))
    assert wire.keys() == MeRead.model_fields.keys()


@pytest.mark.parametrize("expires_at", [None, ENDED])
def test_files_have_the_schemas_members(expires_at: datetime | None) -> None:
    wire = file_to_wire(File(new_id(), "batch", "lines.jsonl", 1, expires_at))
    check(FileRead, wire)
    assert wire.keys() | {"expires_at"} == FileRead.model_fields.keys()


@pytest.mark.parametrize("row", [PENDING, COMPLETED, FAILED])
def test_responses(row: ResultRow) -> None:
    create = ResponseCreate.model_validate({"model": "demo", "input": "x"})
    stored = StoredRequest.of(create.to_stored(OutputRules()))
    assert stored is not None
    wire = to_json(response_to_wire(stored, row))
    check(ResponseRead, wire)
    assert wire.keys() == ResponseRead.model_fields.keys() | stored.echo.keys()
    assert stored.echo.keys() >= create.model_fields_set - {"input"}


@pytest.mark.parametrize("error", [invalid_field("a", "is wrong"), ConflictError("no")])
def test_problems(error: ConflictError) -> None:
    check(ProblemRead, to_json(error.to_problem()))


def test_sampling_parameters_have_a_member_in_each_dialect_of_the_engine() -> None:
    """A parameter that OpenAI's routes lack is named here with the member that stands for it."""
    own = {"max_tokens", "logprobs"}  # of ChatRequest and CompletionRequest, with bounds of OpenAI
    assert SamplingParameters.model_fields.keys() - OpenAIRequest.model_fields.keys() == own


def test_every_reference_of_the_document_leads_to_a_schema() -> None:
    schemas = document()["components"]["schemas"]
    names = {one.removeprefix("#/components/schemas/") for one in references(document())}
    assert names <= schemas.keys()
    assert {one.__name__ for one in (ResultRead, ExportRead, ResultCreate, ProblemRead)} <= names


@pytest.mark.parametrize("model", [ResultCreate, SendOptions, ResultRead, ContextRead, ProblemRead])
def test_the_document_has_each_models_members(model: type[BaseModel]) -> None:
    described = document()["components"]["schemas"][model.__name__]["properties"]
    assert described.keys() == model.model_fields.keys()


def samples() -> list[tuple[str, dict[str, Any]]]:
    """Results in the documents, with what they elide left out."""
    found = []
    for path in SAMPLED:
        for block in re.findall(
            r"^```(?:json|text)\n(\{\"id\".*?)^```", path.read_text(), re.M | re.S
        ):
            text = re.sub(r",\s*\.\.\.(?=\s*[,}])", "", block)
            sample = json.loads(text)
            if "state" in sample:
                found.append((path.name, sample))
    return found


def test_results_in_the_documents_have_members_of_the_schema() -> None:
    found = samples()
    assert {name for name, _ in found} >= {"README.md", "native_api.md"}
    for _, sample in found:
        check(ResultRead, sample, partial=True)


def calls(text: str) -> Iterator[tuple[str, str, str | None]]:
    """Method, path and JSON body of each curl command."""
    for command in re.findall(r"curl (?:[^\n]*\\\n)*[^\n]*", text):
        url = re.search(rf"{HOST}(/[^\s\"'?)|]*)", command)
        body = re.search(r"-d '([^']*)'", command)
        if url:
            method = re.search(r"-X (\w+)", command)
            default = "post" if body else "get"
            yield method[1].lower() if method else default, url[1], body[1] if body else None


def operation_of(method: str, path: str) -> dict[str, Any]:
    for known, operations in document()["paths"].items():
        pattern = re.sub(r"\{\w+(?::path)?\}", r"[^/]+", known)
        if method in operations and re.fullmatch(pattern, path):
            found: dict[str, Any] = operations[method]
            return found
    raise AssertionError(f"no route for {method} {path}")


WITH_CALLS = [path for path in SAMPLED if any(calls(path.read_text()))]


def test_commands_are_found_in_the_documents() -> None:
    assert {path.name for path in WITH_CALLS} >= {"README.md", "history.md", "retention.md"}
    assert sum(1 for path in WITH_CALLS for _ in calls(path.read_text())) > 30


@pytest.mark.parametrize("path", WITH_CALLS, ids=lambda path: path.name)
def test_commands_in_the_documents_send_what_the_routes_take(path: Path) -> None:
    for method, url, body in calls(path.read_text()):
        if url.startswith(("/docs", "/openapi.json")):
            continue
        operation = operation_of(method, url)
        if body is not None:
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            components = {"components": document()["components"]}
            jsonschema.validate(json.loads(body), schema | components)


def test_the_states_of_a_result_are_the_schemas_own() -> None:
    assert set(get_args(ResultRead.model_fields["state"].annotation)) == {
        "pending", "completed", "failed",
    }  # fmt: skip
