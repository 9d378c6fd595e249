"""The check of a finished text against the JSON schema of its request.

The engine forces the schema; an engine that ignores it, or a part of it, must not hand out a text that a client would take for
checked.
"""

from functools import partial
from typing import Any

from app.core.errors import Failure, FailureCode
from app.core.off_loop import MAX_INLINE_CHARACTERS, off_loop
from app.inference.model_registry import ModelRegistry
from app.inference.reasoning import ReasoningFormat, ReasoningUse
from app.inference.schema_check import Fault, compiled, is_compiled
from app.queue.claim import Claim
from app.results.streams.output_buffer import OutputBuffer

_ANY_OBJECT = {"type": "object"}
# A text that ends at one of these may be cut off.
_CUTS = ("stop", "stop_token_ids")
_UNCHECKED = object()


async def check_output(
    claim: Claim, finish_reason: str, written: OutputBuffer, registry: ModelRegistry
) -> Failure | None:
    """The failure of a text that the model ended, and that does not follow its schema."""
    schema = _schema_of(claim.parameters)
    if finish_reason != "stop" or schema is _UNCHECKED:
        return None
    text = str(written)
    if (fault := await _fault_of(schema, text)) is None:
        return None
    for content in await _behind_reasoning(claim.model_name, text, registry):
        if (other := await _fault_of(schema, content)) is None:
            return None
        fault = other if other.is_json else fault
    if not fault.is_json and any(claim.parameters.get(name) for name in _CUTS):
        return None
    return _failure(fault)


def _schema_of(parameters: dict[str, Any]) -> Any:
    constraint = parameters.get("structured_outputs") or {}
    if constraint.get("json_object"):
        return _ANY_OBJECT
    return constraint.get("json", _UNCHECKED)


async def _fault_of(schema: Any, text: str) -> Fault | None:
    # To import the validator and to compile a schema takes milliseconds.
    characters = len(text) if is_compiled(schema) else MAX_INLINE_CHARACTERS + 1
    return await off_loop(characters, partial(_check, schema, text))


def _check(schema: Any, text: str) -> Fault | None:
    check = compiled(schema)
    return None if check is None else check.fault_of(text)


async def _behind_reasoning(model_name: str, text: str, registry: ModelRegistry) -> list[str]:
    """Candidates for the text behind its reasoning, if the engine lets the model reason first.

    The worker does not know whether the prompt ends inside of reasoning. Where it does not have the model's files either, each
    format is tried.
    """
    known = next((one.format for one in registry.all() if one.name == model_name), None)
    formats = [*ReasoningFormat]
    if known is not None:
        if known.reasoning is None or known.constrains_reasoning:
            return []
        formats = [known.reasoning]
    uses = [ReasoningUse(one, is_open) for one in formats for is_open in (False, True)]
    contents = [await off_loop(len(text), partial(_content, use, text)) for use in uses]
    return [content for content in contents if content != text]


def _content(use: ReasoningUse, text: str) -> str:
    reader = use.new_reader()
    pieces = reader.feed(text) + reader.finish()
    return "".join(piece for piece in pieces if isinstance(piece, str))


def _failure(fault: Fault) -> Failure:
    place = f" at `{fault.place[:200]}`" if fault.place else ""
    return Failure(
        FailureCode.INVALID_OUTPUT,
        f"The text does not follow the JSON schema of its request: {fault.reason}{place}. It is kept in `result`. "
        "Send the request again; if it recurs, describe the schema in the prompt, or simplify it.",
        False,
    )
