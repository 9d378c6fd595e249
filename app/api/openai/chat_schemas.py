"""OpenAI's chat completions: requests to messages and parameters, results to choices and chunks.

https://platform.openai.com/docs/api-reference/chat
"""

from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, JsonValue, model_validator

from app.api.openai.chat_messages import MAX_MESSAGES, MAX_TOOLS, ChatMessage
from app.api.openai.chat_tools import Tool, ToolChoice
from app.api.openai.response_format import ResponseFormat
from app.api.openai.schemas import OpenAIRequest
from app.api.schema_parts import Refused, value_error, without_nul
from app.api.tool_use import ToolForm, ToolUse, choose_tool_use
from app.core.bounded_json import check_json
from app.core.errors import invalid_field
from app.core.whole_numbers import WHOLE
from app.inference.prompts import PromptFormat
from app.inference.sampling import MAX_TOKENS
from app.results.requests import SendOptions

# Template variables that requests set by other members.
_OWN_VARIABLES = {
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "chat_template",
}  # fmt: skip


def _check_variables(value: dict[str, Any]) -> dict[str, Any]:
    if own := sorted(_OWN_VARIABLES & value.keys()):
        raise value_error(f"{own[0]} is no variable of yours")
    checked: dict[str, Any] = check_json(value, max_bytes=16_384, max_depth=16)
    return checked


Documents = Annotated[
    list[dict[str, JsonValue]],
    Field(max_length=1000),
    AfterValidator(lambda value: check_json(without_nul(value), max_bytes=2_000_000, max_depth=16)),
]


class ChatRequest(OpenAIRequest):
    """A conversation to continue."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS), WHOLE] | None = Field(
        None, description="The older name of max_completion_tokens."
    )
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS), WHOLE] | None = Field(
        None,
        description="The default is LLM_DEFAULT_MAX_TOKENS, or what the model's length leaves.",
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    response_format: ResponseFormat = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call.")
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = Field(
        None, description="Given to the model's template; `none` also as enable_thinking false."
    )
    include_reasoning: bool | None = Field(
        None, description="vLLM's; false: the model's reasoning is left out of the response."
    )

    add_generation_prompt: bool | None = Field(None, description="vLLM's; the default is true.")
    continue_final_message: bool | None = Field(
        None, description="vLLM's: continue the last message."
    )
    chat_template_kwargs: (
        Annotated[dict[str, JsonValue], AfterValidator(_check_variables)] | None
    ) = Field(
        None,
        description="vLLM's: further variables of the model's template, such as enable_thinking.",
    )
    documents: Documents | None = Field(None, description="vLLM's: given to the template.")

    functions: Refused = Field(None, description="Not supported: use tools.")
    function_call: Refused = Field(None, description="Not supported: use tool_choice.")
    audio: Refused = Field(None, description="Not supported.")
    web_search_options: Refused = Field(None, description="Not supported.")
    chat_template: Refused = Field(None, description="Not supported: the model has its own.")
    echo: Refused = Field(None, description="Not supported.")
    modalities: list[str] | None = Field(None, description="Only text.")

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.modalities and set(self.modalities) != {"text"}:
            raise value_error("modalities can only be text")
        if self.top_logprobs and not self.logprobs:
            raise value_error("top_logprobs needs logprobs to be true")
        return self

    def to_messages(self, prompt_format: PromptFormat | None) -> list[dict[str, Any]]:
        knows_developer = prompt_format is not None and prompt_format.knows_developer
        members = prompt_format.reasoning_members if prompt_format is not None else ()
        return [
            one.to_template(knows_developer=knows_developer, reasoning_members=members)
            for one in self.messages
        ]

    def to_template_arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            arguments["reasoning_effort"] = self.reasoning_effort
            arguments["enable_thinking"] = self.reasoning_effort != "none"  # as in vLLM
        arguments |= self.chat_template_kwargs or {}
        if self.tools and self.tool_choice != "none":
            arguments["tools"] = [tool.to_template() for tool in self.tools]
        if self.documents is not None:
            arguments["documents"] = self.documents
        if self.add_generation_prompt is not None:
            arguments["add_generation_prompt"] = self.add_generation_prompt
        if self.continue_final_message:
            arguments["continue_final_message"] = True
        return arguments

    def to_tool_use(self, prompt_format: PromptFormat | None) -> ToolUse | None:
        """The rules to parse the request's tool calls; None if it has no tools to call.

        Raises InvalidRequestError if the model's template takes no tools, or its calls cannot be parsed.
        """
        use = choose_tool_use(
            self.model or "",
            prompt_format,
            [tool.function for tool in self.tools or ()],
            self.tool_choice,
            is_parallel=self.parallel_tool_calls is not False,
        )
        custom = [tool.function.name for tool in self.tools or () if tool.type == "custom"]
        if use is None or not custom:
            return use
        return replace(use, forms={name: ToolForm(name, is_custom=True) for name in custom})

    def to_send_options(self, use: ToolUse | None) -> SendOptions:
        given: dict[str, Any] = {}
        max_tokens = self.max_completion_tokens or self.max_tokens
        if max_tokens is not None:
            given["max_tokens"] = max_tokens
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        if self.response_format is not None:
            if use is not None:
                raise invalid_field(
                    "response_format", "cannot be combined with tools; send tool_choice none"
                )
            given["structured_outputs"] = self.response_format
        if use is not None:
            given |= use.sampling
        return self.to_options(given)
