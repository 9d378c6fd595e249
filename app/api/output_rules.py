"""Rules to read one request's results, the same in all dialects: reasoning, content and tool calls."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from app.api.tool_use import ToolUse
from app.inference.prompts import PromptFormat
from app.inference.reasoning import OutputReader, Reasoning, ReasoningUse
from app.inference.tool_calls import ToolCall
from app.results.requests import SendOptions
from app.results.rows import ResultRow


@dataclass(slots=True, frozen=True)
class Output:
    """The parts of a text; `late_reasoning` is behind the first content or call."""

    reasoning: str
    content: str
    calls: list[ToolCall]
    late_reasoning: str = ""


@dataclass(slots=True, frozen=True)
class OutputRules:
    """`count_tokens` counts the tokens of reasoning; None: they are not counted."""

    tools: ToolUse | None = None
    reasoning: ReasoningUse | None = None
    count_tokens: Callable[[str], int] | None = field(default=None, compare=False)

    @property
    def is_plain(self) -> bool:
        """All of the text is content."""
        return self.tools is None and self.reasoning is None

    def new_reader(self) -> OutputReader:
        return OutputReader(self.reasoning, self.tools.new_reader() if self.tools else None)

    def accepts_call(self, number: int) -> bool:
        """Return if the call of this number, from 0 on, is returned."""
        return self.tools is not None and (self.tools.is_parallel or number == 0)

    def read(self, text: str) -> Output:
        if self.is_plain:
            return Output("", text, [])
        reader = self.new_reader()
        reasoning: list[str] = []
        late: list[str] = []
        content: list[str] = []
        calls: list[ToolCall] = []
        for piece in reader.feed(text) + reader.finish():
            if isinstance(piece, Reasoning):
                (late if content or calls else reasoning).append(piece.text)
            elif isinstance(piece, str):
                content.append(piece)
            elif self.accepts_call(len(calls)):
                calls.append(piece)
        return Output("".join(reasoning), "".join(content), calls, "".join(late))

    def reasoning_tokens(self, row: ResultRow) -> int | None:
        """The tokens of a completed result's reasoning; None if they are not counted."""
        if self.reasoning is None or self.count_tokens is None:
            return None
        output = self.read(row.text)
        text = output.reasoning + output.late_reasoning
        count = self.count_tokens(text) if text else 0
        most = row.completion_tokens
        return count if most is None else min(count, most)


async def choose_rules(
    prompt_format: PromptFormat | None,
    messages: list[dict[str, Any]],
    arguments: dict[str, Any],
    options: SendOptions,
    tools: ToolUse | None,
) -> tuple[OutputRules, SendOptions]:
    """The rules for a request's results, and its options, which keep the tags in the texts.

    Raises TemplatesBusyError.
    """
    if prompt_format is None or prompt_format.reasoning is None:
        return OutputRules(tools), options
    parameters = options.parameters
    is_constrained = parameters.structured_outputs is not None
    lacks_tags = prompt_format.has_special_tags and parameters.skip_special_tokens
    if lacks_tags or (is_constrained and prompt_format.constrains_reasoning):
        return OutputRules(tools), options
    form = tools.tool_format if tools else None
    ends = form.definition.openings if form else ()
    reasoning = await prompt_format.reasoning_use(messages, arguments, ends=ends)
    if prompt_format.has_special_tags:
        shown = parameters.model_copy(update={"skip_special_tokens": False})
        options = options.model_copy(update={"parameters": shown})
    return OutputRules(tools, reasoning, counter_of(prompt_format)), options


def counter_of(prompt_format: PromptFormat | None) -> Callable[[str], int] | None:
    has_tokenizer = prompt_format is not None and prompt_format.tokenizer is not None
    return prompt_format.count_bare_tokens if prompt_format and has_tokenizer else None
