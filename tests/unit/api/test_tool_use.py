"""The parser of a request's tool calls, for a new request and for its stored form."""

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from app.api.json_codec import parse
from app.api.openai.responses_schemas import ResponseCreate
from app.api.openai.stored_responses import StoredRequest
from app.api.output_rules import OutputRules
from app.inference.prompts import PromptFormat
from app.inference.tool_calls import (
    NamedReader,
    Reader,
    ToolFormat,
    read_all,
    reader_of,
    reader_of_forced,
)

FORMAT = PromptFormat(None, None, {}, None, uses_tools=True, tool_format=ToolFormat.MISTRAL)
TOOL = {"type": "function", "name": "f"}
LIST = '[{"name": "f", "parameters": {"a": 1}}]'


@pytest.mark.parametrize(
    ("choice", "is_parallel", "new_reader"),
    [
        ("auto", True, lambda: reader_of(ToolFormat.MISTRAL)),
        ("auto", False, lambda: reader_of(ToolFormat.MISTRAL)),
        ("required", False, reader_of_forced),
        (TOOL, True, lambda: NamedReader("f")),
    ],
)
def test_a_stored_request_is_parsed_like_the_new_one(
    choice: Any, is_parallel: bool, new_reader: Callable[[], Reader]
) -> None:
    members = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": is_parallel}
    create = parse(ResponseCreate, orjson.dumps({"model": "m", "input": "hi"} | members))
    use = create.to_chat().to_tool_use(FORMAT)
    stored = StoredRequest.of(create.to_stored(OutputRules(use)))
    assert use is not None
    assert stored is not None
    assert stored.rules.tools is not None
    for one in (use, stored.rules.tools):
        for output in (LIST, f"[TOOL_CALLS]{LIST}", '{"a": 1}'):
            assert read_all(one.new_reader(), output) == read_all(new_reader(), output)
        assert (one.tool_format, one.is_parallel) == (ToolFormat.MISTRAL, is_parallel)
        assert one.finish_reason("stop", 1) == ("stop" if choice == TOOL else "tool_calls")
