"""Pooling models: they compute a vector of a text, or scores of documents for a query, and generate nothing."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.core.whole_numbers import WHOLE

Task = Literal["embed", "score"]

MAX_DIMENSIONS = 65_536
# Marks the stored parameters of a request to a pooling model, by its task.
TASK = "task"
QUERY, DOCUMENT = "query", "document"  # roles of the texts of a score
MAX_DOCUMENTS = 1_000  # of one query


class _Parameters(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    truncate: bool | None = None
    """Cut what exceeds the model's length; otherwise the result fails."""


class EmbeddingParameters(_Parameters):
    """Parameters of a vector."""

    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS), WHOLE] | None = Field(
        None,
        description="Length of the vector, where the model was trained for several.",
    )
    normalize: bool | None = None
    """False: the vector as the model pools it. By default its length is 1 if the model normalizes."""

    def to_stored(self) -> dict[str, Any]:
        return {TASK: "embed"} | self.model_dump(exclude_none=True)


class ScoreParameters(_Parameters):
    """Parameters of a score, or of several for one query."""

    raw: bool | None = None
    """True: the model's number itself. By default its activation maps it, mostly to 0..1."""

    def to_stored(self) -> dict[str, Any]:
        return {TASK: "score"} | self.model_dump(exclude_none=True)


def task_of(parameters: Mapping[str, Any]) -> Task | None:
    """The task of stored parameters; None for those of a generation or an attribution."""
    task: Task | None = parameters.get(TASK)
    return task


def model_task(engine: Mapping[str, Any], config: Mapping[str, Any]) -> Task | None:
    """The task of an engine with this model.json and config.json; None if it generates text."""
    if engine.get("runner") != "pooling":
        return None
    classifies = engine.get("convert") == "classify"
    return "score" if classifies or _is_classifier(config) else "embed"


def is_pooling(config: Mapping[str, Any], *, is_sentence_transformer: bool) -> bool:
    """Return if a model's files are those of an embeddings model or of a cross encoder."""
    if is_sentence_transformer or _is_classifier(config):
        return True
    return any(
        name.endswith("Model") and not name.endswith(("LMHeadModel", "ChatGLMModel"))
        for name in _architectures(config)
    )


def _is_classifier(config: Mapping[str, Any]) -> bool:
    return any(name.endswith("ForSequenceClassification") for name in _architectures(config))


def _architectures(config: Mapping[str, Any]) -> Sequence[str]:
    return config.get("architectures") or ()
