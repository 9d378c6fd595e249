"""/v1/models: the models that are ready, in the shape of the client's dialect.

OpenAI's and Anthropic's clients read the same paths; Anthropic's send the header `anthropic-version`.
https://platform.openai.com/docs/api-reference/models, https://docs.anthropic.com/en/api/models-list
"""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from app.api.dependencies import ServicesOf, TeamOf
from app.api.errors import anthropic_errors
from app.api.json_codec import json_response
from app.api.raw_routes import describe
from app.core.errors import invalid_field
from app.inference.model_registry import Model

router = APIRouter(tags=["openai"])

PATH = anthropic_errors.MODELS
_LIFECYCLES = {"active", "deprecated", "retired"}  # Anthropic's; ready models are active
_DEFAULT_LIMIT, _MAX_LIMIT = 20, 1_000
_UNKNOWN_TIME = datetime.fromtimestamp(0, UTC)  # as Anthropic's API has it

_HEADER = {
    anthropic_errors.VERSION_HEADER: {
        "schema": {"type": "string"},
        "description": "Any value: the response has Anthropic's shape.",
    }
}
_TEXT = {"schema": {"type": "string"}}
_LIMIT = {"type": "integer", "minimum": 1, "maximum": _MAX_LIMIT, "default": _DEFAULT_LIMIT}
_STATES = {"type": "array", "items": {"type": "string", "enum": sorted(_LIFECYCLES)}}
_QUERY: dict[str, dict[str, Any]] = {
    "limit": {"schema": _LIMIT, "description": "Anthropic's: most models of a page."},
    "after_id": _TEXT | {"description": "Anthropic's: only models behind this one."},
    "before_id": _TEXT | {"description": "Anthropic's: only models before this one."},
    "lifecycle": {"schema": _STATES, "description": "Anthropic's: ready models are active."},
}


class OpenAIModelRead(BaseModel):
    id: str
    object: Literal["model"]
    created: int = Field(description="When the service saw the model first.")
    owned_by: str
    max_model_len: int | None
    parent: str | None = Field(None, description="An adapter's model.")


class OpenAIModelListRead(BaseModel):
    object: Literal["list"]
    data: list[OpenAIModelRead]


class AnthropicModelRead(BaseModel):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: datetime = Field(description="When the service saw the model first.")
    lifecycle: Literal["active"]
    max_input_tokens: int | None
    max_tokens: int | None
    capabilities: None


class AnthropicModelListRead(BaseModel):
    data: list[AnthropicModelRead]
    has_more: bool
    first_id: str | None
    last_id: str | None


@router.head(PATH, include_in_schema=False)
@router.head(f"{PATH}/", include_in_schema=False)
@router.get(f"{PATH}/", include_in_schema=False)
@router.get(
    PATH,
    response_model=OpenAIModelListRead | AnthropicModelListRead,
    openapi_extra=describe(header=_HEADER, query=_QUERY),
)
async def list_openai_models(request: Request, services: ServicesOf, team_id: TeamOf) -> Response:
    """List the models that are ready, and their adapters."""
    models = services.registry.all()
    if anthropic_errors.is_request(request.scope):
        return json_response(_answer_anthropic(request, models, team_id))
    ready = [model for model in models if model.ready]
    data = [_to_openai(model, name) for model in ready for name in model.names_of(team_id)]
    return json_response({"object": "list", "data": data})


@router.get(
    f"{PATH}/{{model:path}}",
    response_model=OpenAIModelRead | AnthropicModelRead,
    openapi_extra=describe(header=_HEADER),
)
async def read_openai_model(
    model: str, request: Request, services: ServicesOf, team_id: TeamOf
) -> Response:
    """Read one model."""
    found = await services.registry.find(model.rstrip("/"), team_id)
    to_wire = _to_anthropic if anthropic_errors.is_request(request.scope) else _to_openai
    return json_response(to_wire(found, found.full_name))


def _to_openai(model: Model, name: str) -> dict[str, Any]:
    seen_at = model.first_seen_at  # Triton has no time of creation
    return {
        "id": name,
        "object": "model",
        "created": int(seen_at.timestamp()) if seen_at else 0,
        "owned_by": "llm-api-service",
        "max_model_len": model.max_model_len,
    } | ({} if name == model.name else {"parent": model.name})


def _to_anthropic(model: Model, name: str) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": _created_at(model).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len,
        "max_tokens": model.max_model_len,
        "capabilities": None,
    }


def _created_at(model: Model) -> datetime:
    return (model.first_seen_at or _UNKNOWN_TIME).astimezone(UTC)


def anthropic_page(
    models: Sequence[Model],
    team_id: str | None,
    *,
    limit: int = _DEFAULT_LIMIT,
    after_id: str | None = None,
    before_id: str | None = None,
) -> dict[str, Any]:
    """A page of the ready models, newest first. A cursor may name a model that is not ready any more.

    Raises InvalidRequestError for a cursor that names no model of the team.
    """
    newest_first = sorted(models, key=_created_at, reverse=True)
    known = [(model, name) for model in newest_first for name in model.names_of(team_id)]
    places = {name: place for place, (_, name) in enumerate(known)}
    for cursor, name in (("after_id", after_id), ("before_id", before_id)):
        if name is not None and name not in places:
            raise invalid_field(cursor, "there is no such model")
    begin = 0 if after_id is None else places[after_id] + 1
    end = None if before_id is None else places[before_id]
    found = [(model, name) for model, name in known[begin:end] if model.ready]
    page = found[:limit] if before_id is None else found[-limit:]
    data = [_to_anthropic(model, name) for model, name in page]
    return {
        "data": data,
        "has_more": len(found) > limit,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


def _answer_anthropic(request: Request, models: Sequence[Model], team_id: str) -> dict[str, Any]:
    query = request.query_params
    # The client repeats `lifecycle[]` for several states.
    states = {*query.getlist("lifecycle"), *query.getlist("lifecycle[]")}
    if states - _LIFECYCLES:
        raise invalid_field("lifecycle", f"must be of {', '.join(sorted(_LIFECYCLES))}")
    return anthropic_page(
        models if not states or "active" in states else [],
        team_id,
        limit=_to_limit(query.get("limit", str(_DEFAULT_LIMIT))),
        after_id=query.get("after_id"),
        before_id=query.get("before_id"),
    )


def _to_limit(text: str) -> int:
    if re.fullmatch("[0-9]{1,4}", text) and 1 <= int(text) <= _MAX_LIMIT:
        return int(text)
    raise invalid_field("limit", f"must be a number from 1 to {_MAX_LIMIT}")
