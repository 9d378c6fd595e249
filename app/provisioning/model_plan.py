"""GPUs on which a model would fit, for the HTTP API: reads the files that a launch would read."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from app.core.errors import invalid_field
from app.core.whole_numbers import WHOLE
from app.provisioning.catalogue import CatalogueEntry, ModelName, Revision
from app.provisioning.profiles import Name, Profile, Provider
from app.provisioning.resources import facts_of
from app.provisioning.sizing.architecture import read_facts
from app.provisioning.sizing.document import to_document
from app.provisioning.sizing.facts import ModelFacts, PlanError
from app.provisioning.sizing.fit import (
    MAX_CONCURRENCY,
    MAX_CONTEXT,
    MAX_GPUS,
    MAX_MINUTES,
    Engine,
    plan,
)
from app.provisioning.sizing.gpus import GPUS, find_gpus
from app.provisioning.sizing.resources import MAX_NODES
from app.provisioning.sizing.weights import with_quantization
from app.provisioning.spec import ModelChoice, StrictModel, resolve

_OPTIONS = ("context", "concurrency", "dtype", "quantization")


class PlanCreate(StrictModel):
    """A model, by name or by its config.json, and its intended use."""

    model: ModelName | None = Field(
        None, description="As in POST /launches. Its files must be on the API's machine."
    )
    revision: Revision | None = None
    provider: Provider | None = None
    profile: Name | None = Field(None, description="Profile of the launch.")
    config: dict[str, Any] | None = Field(
        None, description="The document of its config.json, in place of `model`."
    )
    gpus: Annotated[list[Annotated[str, Field(max_length=40)]], Field(max_length=32)] = Field(
        default_factory=list,
        description="Kinds of GPU such as `a100-80`, or `a100` with any memory; none: all.",
    )
    context: Annotated[int, Field(ge=1, le=MAX_CONTEXT), WHOLE] | None = Field(
        None,
        description="Tokens of a request, prompt and output; default: the model's, 4096 at most.",
    )
    concurrency: Annotated[int, Field(ge=1, le=MAX_CONCURRENCY), WHOLE] = Field(
        1, description="Requests that are to run at the same time."
    )
    dtype: Literal["bfloat16", "float16", "float32"] | None = Field(
        None, description="Type that the model runs in; default: its own."
    )
    quantization: Annotated[str, Field(max_length=40)] | None = Field(
        None, description="Compression of weights, if the model has none."
    )
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    max_gpus: Annotated[int, Field(ge=1, le=MAX_GPUS), WHOLE] = Field(
        8, description="Most of a node."
    )
    max_nodes: Annotated[int, Field(ge=1, le=MAX_NODES), WHOLE] = Field(
        1, description="Most nodes of a launch; several are taken where one is not enough."
    )
    minutes: Annotated[int, Field(ge=1, le=MAX_MINUTES), WHOLE] = Field(
        60, description="Serving time."
    )

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if (self.model is None) == (self.config is None):
            raise ValueError("give `model`, or `config`, and not both")
        return self


def plan_model(
    request: PlanCreate, profiles: dict[str, Profile], catalogue: dict[str, CatalogueEntry]
) -> dict[str, Any]:
    """The table of `app.provisioning.sizing` as a document; blocks. Raises InvalidRequestError."""
    facts = _facts(request, profiles, catalogue)
    engine = Engine(
        dtype=request.dtype,
        kv_cache_dtype=request.kv_cache_dtype,
        gpu_memory_utilization=request.gpu_memory_utilization,
        max_gpus=request.max_gpus,
        max_nodes=request.max_nodes,
    )
    try:
        gpus = dict.fromkeys(gpu for name in request.gpus or GPUS for gpu in find_gpus(name))
    except PlanError as error:
        raise invalid_field("gpus", str(error)) from error
    try:
        facts = with_quantization(facts, request.quantization)
        plans = plan(facts, gpus, request.context, request.concurrency, engine, request.minutes)
    except PlanError as error:
        option, _, message = str(error).partition(": ")
        raise (
            invalid_field(option, message)
            if option in _OPTIONS
            else invalid_field("body", str(error))
        ) from error
    return to_document(facts, plans)


def _facts(
    request: PlanCreate, profiles: dict[str, Profile], catalogue: dict[str, CatalogueEntry]
) -> ModelFacts:
    if request.model is None:
        try:
            return read_facts(request.config)
        except PlanError as error:
            raise invalid_field("config", str(error)) from error
    choice = ModelChoice.model_validate(request, from_attributes=True)
    profile, model, revision = resolve(choice, profiles, catalogue.get(request.model))
    try:
        facts = facts_of(model, revision, profile)
    except PlanError as error:
        raise invalid_field("model", str(error)) from error
    if facts is None:
        place = "cache" if not model.startswith("/") else "model roots"
        why = (
            "its files are on another machine"
            if profile.host
            else f"it has no config.json in the {place} of the profile {profile.name!r}"
        )
        raise invalid_field("model", f"{why}: send the document of its config.json as `config`")
    return facts
