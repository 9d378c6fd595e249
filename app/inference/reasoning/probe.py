"""The state in which a chat template leaves the model: inside of reasoning, or before it.

Some templates end the prompt with an opening tag, some with closed, empty reasoning, and variables as
`enable_thinking` decide. A probe renders a short conversation with the request's variables and reads the
prompt's end.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from app.core.errors import InvalidRequestError
from app.inference.chat_templates import Messages
from app.inference.reasoning import ReasoningFormat

Render = Callable[[Messages, Mapping[str, Any]], Awaitable[str]]

_MAX_KNOWN = 64
_STUB = "one short message"
_USER: Messages = [{"role": "user", "content": _STUB}]
_CALL = {
    "id": "lookcall1",  # Mistral's templates accept only nine letters and digits
    "type": "function",
    "function": {"name": "look", "arguments": {}},
}
_AFTER_TOOL: Messages = [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": _CALL["id"], "name": "look", "content": _STUB},
]
_TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}},
]


class OpenPrompts:
    """Cache of the probes of one model's template, which renders each variant of variables once."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, bool] = OrderedDict()

    async def is_open(
        self,
        form: ReasoningFormat,
        render: Render,
        last: Mapping[str, Any],
        arguments: Mapping[str, Any],
    ) -> bool:
        """Return if the prompt behind the message `last` ends inside of reasoning.

        Raises TemplatesBusyError.
        """
        if arguments.get("continue_final_message") or not arguments.get(
            "add_generation_prompt", True
        ):
            return _ends_open(form, str(last.get("content") or ""))
        variables = {name: arguments[name] for name in arguments if name != "documents"}
        if "tools" in variables:
            variables["tools"] = _TOOLS
        is_after_tool = last.get("role") == "tool"
        key = orjson.dumps([is_after_tool, variables], option=orjson.OPT_SORT_KEYS)
        if key not in self._known:
            self._known[key] = await _probe(form, render, is_after_tool, variables)
        self._known.move_to_end(key)
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return self._known[key]


async def _probe(
    form: ReasoningFormat, render: Render, is_after_tool: bool, variables: Mapping[str, Any]
) -> bool:
    for messages in (_AFTER_TOOL, _USER) if is_after_tool else (_USER,):
        try:
            prompt = await render(messages, variables)
        except InvalidRequestError:  # the template refuses these messages, or variables
            continue
        return _ends_open(form, prompt[prompt.rfind(_STUB) + len(_STUB) :])
    return False


def _ends_open(form: ReasoningFormat, text: str) -> bool:
    definition = form.definition
    return text.rfind(definition.opening) > text.rfind(definition.closing)
