"""Tools that a dialect's own provider runs, such as a search of the web: no model here can call them.

Agents send them in each request, whether the model needs them or not: they are left out by default.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from app.api.schema_parts import STRICT
from app.core.errors import invalid_field

HostedTools = Literal["skip", "refuse"]

WARNING_HEADER = "X-Warning"
_MAX_NAMED = 16  # in the header
# A header names it.
HostedType = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")]


class HostedTool(BaseModel):
    """A tool that this service does not run: LLM_HOSTED_TOOLS leaves it out, or refuses the request."""

    model_config = STRICT

    type: HostedType


def check_hosted(choice: HostedTools, hosted: Mapping[str, str]) -> None:
    """Raise InvalidRequestError if tools are refused. `hosted` are their types, by their places."""
    for field, kind in hosted.items():
        if choice == "refuse":
            raise invalid_field(
                field,
                f"{kind!r} is not supported: this service runs no tools of its own; send functions",
            )


def warnings_of(kinds: Sequence[str]) -> dict[str, str]:
    """The header that names what was left out."""
    named = list(dict.fromkeys(kinds))[:_MAX_NAMED]
    if not named:
        return {}
    return {WARNING_HEADER: f"Left out, because this service does not run it: {', '.join(named)}"}
