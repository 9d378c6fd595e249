"""The first version of Text Generation Inference's /generate, of October and November 2022.

https://github.com/huggingface/text-generation-inference, 4236e41b: router/src/lib.rs (shapes),
router/src/validation.rs (rules and their messages) and server/text_generation/utils.py (sampling).
Unknown members are ignored, and null is refused, as in the first version. Its paths name no version:
LLM_TGI_GENERATE serves this route at /generate.
"""

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from app.api.json_codec import parse
from app.api.raw_routes import body_of
from app.api.tgi import router as current
from app.api.tgi.schemas import GenerateParameters, GenerateRequest
from app.core.errors import InvalidRequestError
from app.core.whole_numbers import WHOLE
from app.results.drafts import GroupRequest
from app.results.requests import MAX_PROMPT_CHARACTERS

raw = APIRouter(tags=["Text Generation Inference"])

PATH = "/tgi-v0/generate"

_MAX_NEW_TOKENS = 512
_LENIENT = ConfigDict(extra="ignore", strict=True)
_EXAMPLE = {"inputs": "def ", "parameters": {"max_new_tokens": 20, "do_sample": False}}


class FirstParameters(BaseModel):
    """Parameters of the generation. Their bounds are checked with messages like the first version's."""

    model_config = _LENIENT

    temperature: float = Field(1.0, description="> 0; other than 1 it means sampling.")
    top_k: Annotated[int, WHOLE] = Field(0, description="> 0 means sampling; 0: all tokens.")
    top_p: float = Field(1.0, description="> 0 and <= 1; below 1 it means sampling.")
    do_sample: bool = False
    max_new_tokens: Annotated[int, WHOLE] = Field(
        20, description=f"At most {_MAX_NEW_TOKENS}; 0 means 1."
    )

    @property
    def is_sampling(self) -> bool:
        return self.do_sample or self.temperature != 1.0 or self.top_k != 0 or self.top_p < 1.0


class FirstGenerateRequest(BaseModel):
    """A prompt, and how to continue it."""

    model_config = _LENIENT

    inputs: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)]
    parameters: FirstParameters = Field(default_factory=FirstParameters)
    model: str | None = Field(
        None, description="This service's: a model's name; default: the setting LLM_DEFAULT_MODEL."
    )
    reuse: bool | None = Field(
        None,
        description="This service's: a completed result of an equal request answers it (docs/reuse.md).",
    )


@raw.post(
    PATH,
    responses={200: {"description": "A list of one text: the prompt, then the generated text."}},
    openapi_extra=current.describe_generation(FirstGenerateRequest, _EXAMPLE),
)
async def generate(request: Request) -> Response:
    """Continue a prompt as TGI's first version; `X-Result-Id` names the result."""
    began = time.perf_counter()
    wanted = parse(FirstGenerateRequest, await body_of(request))
    given = wanted.parameters
    for fault in _faults(given):
        raise InvalidRequestError(fault)
    generation, group = await current.prepare(request, _to_current(wanted), is_stream=False)
    if given.is_sampling:
        group = _without_model_defaults(group, given)
    return await current.respond_text(request, generation, group, began, is_listed=True)


def _faults(given: FirstParameters) -> Iterable[str]:
    """Violations, in the order of the first version's checks."""
    if given.temperature <= 0:  # the first version accepts 0, and its generation fails
        yield "temperature must be strictly positive"
    if not 0 < given.top_p <= 1:
        yield "top_p must be > 0.0 and <= 1.0"
    if given.top_k < 0:
        yield "top_k must be >= 0"
    if not 0 <= given.max_new_tokens <= _MAX_NEW_TOKENS:
        yield f"max_new_tokens must be >= 0 and <= {_MAX_NEW_TOKENS}"


def _to_current(wanted: FirstGenerateRequest) -> GenerateRequest:
    given = wanted.parameters
    parameters = GenerateParameters(
        temperature=given.temperature,
        top_k=given.top_k or None,
        top_p=given.top_p if given.top_p < 1 else None,
        do_sample=given.do_sample,
        max_new_tokens=max(1, given.max_new_tokens),
        return_full_text=True,
    )
    return GenerateRequest(
        inputs=wanted.inputs, parameters=parameters, model=wanted.model, reuse=wanted.reuse
    )


def _without_model_defaults(group: GroupRequest, given: FirstParameters) -> GroupRequest:
    """The same with the first version's own defaults, where the engine would take the model's."""
    defaults = {"top_k": given.top_k, "top_p": given.top_p}
    parameters = group.options.parameters.model_copy(update=defaults)
    return replace(group, options=group.options.model_copy(update={"parameters": parameters}))
