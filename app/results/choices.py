"""The results of one request: what they store together, and each choice of a prompt."""

from dataclasses import replace
from uuid import UUID

import orjson

from app.inference.model_registry import Model
from app.queue.enqueue import NewResult
from app.results.drafts import GroupRequest, invalid, to_json
from app.results.reuse import text_of, with_digest

# Each result stores its rendered prompt and its parameters: sixteen of the longest prompts take PostgreSQL
# a second.
MAX_CHOICES_CHARACTERS = 32_000_000


def characters_of(request: GroupRequest) -> tuple[int, int]:
    """The characters of the messages that a request's results store together, and those of them that
    its body has not: a query for each document, a prompt for each choice.
    """
    texts = [message["content"] for prompt in request.prompts for message in prompt.messages or ()]
    stored = request.n * sum(map(len, texts))
    given = sum(len(text) for text in {id(text): text for text in texts}.values())
    return stored, stored - given


def check_choices(characters: int, n: int) -> None:
    """Raise InvalidRequestError for prompts and parameters that are too long for all results."""
    if characters > MAX_CHOICES_CHARACTERS:
        raise invalid(
            "n" if n > 1 else "messages",
            f"the prompts and parameters of all results have {characters:,} characters, with what each "
            f"repeats; those of a request may have {MAX_CHOICES_CHARACTERS:,}",
        )


def choice_of(
    first: NewResult, request: GroupRequest, model: Model, place: int, result_id: UUID
) -> NewResult:
    """The choice at this place of the prompt whose first choice is given."""
    result = replace(
        first,
        id=result_id,
        parameters=_of_choice(first.parameters, place),
        on_disconnect=request.on_disconnect,
        request=request.request,
        store=request.store,
    )
    if first.reuse_digest is not None and place:  # its seed is its own
        return with_digest(result, model, text_of(result))
    return result


def _of_choice(parameters: str, place: int) -> str:
    members = orjson.loads(parameters) if place else {}
    if members.get("seed") is None:
        return parameters
    return to_json(members | {"seed": members["seed"] + place})
