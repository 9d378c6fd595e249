"""The programs that the page shows: each is valid, and has the key of the environment where one is needed."""

import ast
from typing import Any

import pytest

from app.ui import snippets

CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "a \"b\"\n'c' {x}"}],
    "parameters": {"max_tokens": 3, "logprobs": 2, "top_k": 5},
}
TEXT: dict[str, Any] = {"model": "demo", "content": "x" * 200, "parameters": {"logprobs": 2}}


@pytest.mark.parametrize("body", [CHAT, TEXT])
@pytest.mark.parametrize("needs_token", [False, True])
def test_programs(body: dict[str, Any], *, needs_token: bool) -> None:
    shown = snippets.of_request("https://llm.example", body, needs_token=needs_token)
    assert list(shown) == ["Python", "curl", "Python with openai"]
    assert shown["Python"].startswith("from llm_api_client import Client\n")
    for name in ("Python", "Python with openai"):
        literals = [
            one.value for one in ast.walk(ast.parse(shown[name])) if isinstance(one, ast.Constant)
        ]
        assert (body.get("messages") or [{"content": body["content"]}])[0]["content"] in literals
    assert all(("LLM_API_KEY" in text) is needs_token for text in shown.values())


def test_parameters_that_the_openai_client_does_not_know() -> None:
    shown = snippets.of_request("https://llm.example", CHAT, needs_token=False)
    program = shown["Python with openai"]
    assert "    extra_body={'top_k': 5},\n" in program
    assert "    logprobs=True,\n    top_logprobs=2,\n" in program
    shown = snippets.of_request("https://llm.example", TEXT, needs_token=False)
    assert "    logprobs=2,\n)" in shown["Python with openai"]
