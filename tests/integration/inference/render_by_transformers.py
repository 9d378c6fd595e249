"""Renders chat templates as transformers does: cases as JSON on stdin, texts on stdout.

Runs in Triton's environment. A case that a template refuses is answered with null.
"""

import json
import sys
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast


def render(case: dict[str, Any]) -> str | None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
        **case["special_tokens"],
    )
    tokenizer.chat_template = case["templates"]
    arguments = {"add_generation_prompt": True, **case["arguments"]}
    try:
        text = tokenizer.apply_chat_template(case["messages"], tokenize=False, **arguments)
    except Exception:  # noqa: BLE001 # a template may raise anything
        return None
    assert isinstance(text, str)
    return text


json.dump([render(case) for case in json.load(sys.stdin)], sys.stdout)
