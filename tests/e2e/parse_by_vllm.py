"""Splits texts as vLLM's own parsers do: cases as JSON on stdin, parts as JSON on stdout.

Runs in Triton's environment. A case has `kind` (`reasoning` or `tools`), the `parser` by vLLM's name, the
`text`, the `tools` and the tags that its tokenizer is `without`. A parser that raises is answered with its
error as a text.
"""

import json
import sys
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

BAR, GAP = "\uff5c", "\u2581"
TOKENS = [
    "<think>", "</think>", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>", "<tool_call>",
    "</tool_call>", "<seed:tool_call>", "</seed:tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<|python_tag|>", "<|python_start|>", "<|python_end|>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>",
    *(f"<{BAR}tool{GAP}{words}{BAR}>" for words in (
        f"calls{GAP}begin", f"calls{GAP}end", f"call{GAP}begin", f"call{GAP}end", "sep",
    )),
]  # fmt: skip


def make_tokenizer(without: list[str]) -> PreTrainedTokenizerFast:
    """A token for each character, and for each of the parsers' tags."""
    characters = [chr(code) for code in range(32, 1024)] + ["\n", "\t"]
    vocabulary = {one: place for place, one in enumerate(["[UNK]", *characters])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.add_tokens(
        [AddedToken(one, special=False, normalized=False) for one in TOKENS if one not in without]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")


def request_of(tools: list[dict[str, Any]] | None) -> ChatCompletionRequest:
    return ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "x"}], tools=tools or None
    )


def split_reasoning(case: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    parser = ReasoningParserManager.get_reasoning_parser(case["parser"])(tokenizer)
    return [one or "" for one in parser.extract_reasoning(case["text"], request_of(None))]


def stream_reasoning(case: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The same in a stream, a token a delta."""
    parser = ReasoningParserManager.get_reasoning_parser(case["parser"])(tokenizer)
    text = ""
    ids: list[int] = []
    parts = ["", ""]
    pieces = tokenizer.backend_tokenizer.encode(case["text"], add_special_tokens=False)
    deltas = []
    for token, (begins, ends) in zip(pieces.ids, pieces.offsets, strict=True):
        delta = case["text"][begins:ends]
        deltas.append(
            parser.extract_reasoning_streaming(
                text, text + delta, delta, ids, [*ids, token], [token]
            )
        )
        text, ids = text + delta, [*ids, token]
    if hasattr(parser, "finish_streaming"):
        deltas.append(parser.finish_streaming())
    for one in deltas:
        if one is not None:
            parts[0] += one.reasoning or ""
            parts[1] += one.content or ""
    return parts


def find_calls(case: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> list[Any]:
    request = request_of(case["tools"])
    parser = ToolParserManager.get_tool_parser(case["parser"])(tokenizer, request.tools)
    found = parser.extract_tool_calls(case["text"], request)
    calls = [[one.function.name, one.function.arguments] for one in found.tool_calls]
    return [found.content or "", calls]


KINDS = {"reasoning": split_reasoning, "stream": stream_reasoning, "tools": find_calls}


def answer(case: dict[str, Any]) -> Any:
    try:
        return KINDS[case["kind"]](case, make_tokenizer(case["without"]))
    except Exception as error:  # noqa: BLE001 # a parser may raise anything
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    output = sys.stdout
    sys.stdout = sys.stderr  # vLLM's imports print
    json.dump([answer(case) for case in json.load(sys.stdin)], output)
    output.flush()  # vLLM ends the process early
