"""Requests for messages: members and bounds, and what the engine and the template get of them.

https://docs.anthropic.com/en/api/messages. Unknown members and headers are ignored, as clients expect.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from app.api.anthropic.blocks import Texts
from app.api.anthropic.conversation import MessageParam, hosted_blocks, is_prefill, to_template
from app.api.anthropic.tools import ToolChoice, Tools, hosted_tools, own_tools
from app.api.json_codec import to_field_errors
from app.api.refused_sampling import RefusedExtensions
from app.api.schema_parts import STRICT, Refused
from app.api.tool_use import ToolUse, choose_tool_use
from app.core.errors import InvalidRequestError, invalid_field
from app.core.whole_numbers import WHOLE
from app.inference.prompts import PromptFormat
from app.inference.sampling import MAX_TOKENS, SamplingParameters, StopText
from app.inference.structured_outputs import check_schema
from app.results.requests import SendOptions

_MAX_MESSAGES = 10_000
_Float = Field(allow_inf_nan=False)


class Metadata(BaseModel):
    model_config = STRICT

    user_id: Annotated[str, Field(max_length=1024)] | None = None


class Thinking(BaseModel):
    model_config = STRICT

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS), WHOLE] | None = Field(
        None, description="Ignored: thoughts count in max_tokens."
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: the message has no thinking blocks."
    )


class OutputFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, JsonValue], AfterValidator(check_schema)] = Field(
        alias="schema"
    )


class OutputConfig(BaseModel):
    model_config = STRICT

    effort: Annotated[str, Field(max_length=32)] | None = Field(
        None, description="Given to the model's template as reasoning_effort."
    )
    format: OutputFormat | None = None


class TokenCountRequest(BaseModel):
    """A conversation whose tokens are counted."""

    model_config = STRICT

    model: Annotated[str, Field(min_length=1, max_length=256)]
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=_MAX_MESSAGES)]
    system: Texts | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = Field(
        None, description="Given to the model's template as enable_thinking."
    )
    output_config: OutputConfig | None = None
    cache_control: JsonValue = Field(None, description="Ignored, here and in blocks.")

    mcp_servers: Refused = Field(None, description="Not supported.")

    @property
    def hosted(self) -> dict[str, str]:
        """The types of tools and blocks of tools that this service does not run, by their places."""
        return hosted_tools(self.tools) | hosted_blocks(self.messages)

    def to_messages(self, prompt_format: PromptFormat | None) -> list[dict[str, Any]]:
        members = prompt_format.reasoning_members if prompt_format is not None else ()
        return to_template(self.system, self.messages, members)

    def to_template_arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if self.thinking is not None:
            arguments["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config is not None and self.output_config.effort is not None:
            arguments["reasoning_effort"] = self.output_config.effort
        tools = own_tools(self.tools)
        if tools and (self.tool_choice is None or self.tool_choice.type != "none"):
            arguments["tools"] = [tool.to_template() for tool in tools]
        if is_prefill(self.messages):
            arguments |= {"add_generation_prompt": False, "continue_final_message": True}
        return arguments

    def to_tool_use(self, prompt_format: PromptFormat | None) -> ToolUse | None:
        choice = self.tool_choice
        return choose_tool_use(
            self.model,
            prompt_format,
            own_tools(self.tools),
            None if choice is None else choice.to_choice(),
            is_parallel=choice is None or not choice.disable_parallel_tool_use,
        )


class MessageRequest(TokenCountRequest, RefusedExtensions):
    """A conversation to continue."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS), WHOLE]
    stream: bool | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=16)] | None = None
    temperature: Annotated[float, _Float, Field(ge=0, le=2)] | None = Field(
        None, description="0 is greedy; the default is 1."
    )
    top_p: Annotated[float, _Float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1_000_000), WHOLE] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = Field(
        None, description="Not Anthropic's: makes sampling repeatable on one engine."
    )
    reuse: bool | None = Field(
        None,
        description="Not Anthropic's: a completed result of an equal request answers it (docs/reuse.md).",
    )
    metadata: Metadata | None = Field(None, description="`user_id` is kept with the result.")
    service_tier: str | None = Field(None, description="Ignored.")
    output_format: OutputFormat | None = Field(
        None, description="The older name of output_config.format, which goes before it."
    )

    container: Refused = Field(None, description="Not supported.")

    @property
    def shows_thinking(self) -> bool:
        thinking = self.thinking
        return thinking is None or (thinking.type != "disabled" and thinking.display != "omitted")

    def to_send_options(self, use: ToolUse | None) -> SendOptions:
        """Raises InvalidRequestError."""
        sampling: dict[str, Any] = {
            name: value
            for name in ("max_tokens", "temperature", "top_p", "top_k", "seed")
            if (value := getattr(self, name)) is not None
        }
        if self.stop_sequences:
            # The engine does not report which text ended the output: it stays at its end.
            sampling |= {"stop": self.stop_sequences, "include_stop_str_in_output": True}
        wanted = (self.output_config and self.output_config.format) or self.output_format
        if wanted is not None:
            if use is not None:
                raise invalid_field(
                    "output_config", "a format cannot be combined with tools; send tool_choice none"
                )
            sampling["structured_outputs"] = {"json": wanted.json_schema}
        if use is not None:
            sampling |= use.sampling
        user_id = self.metadata.user_id if self.metadata else None
        metadata = {} if user_id is None else {"user_id": user_id}
        try:
            parameters = SamplingParameters(**sampling)
            return SendOptions(parameters=parameters, metadata=metadata, reuse=self.reuse)
        except ValidationError as error:
            fields = to_field_errors(error.errors())
            raise InvalidRequestError(f"{fields[0].field}: {fields[0].message}.", fields) from error
