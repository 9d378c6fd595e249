"""Texts of an engine that ignores the schema of a request, in each dialect."""

from typing import Any

import pytest

from tests.conftest import Service

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"type": "json_schema", "name": "n", "schema": SCHEMA}
OPENAI = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
}
MESSAGES = {
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "max_tokens": 50,
}
RESPONSES = {"text": {"format": NAMED}}
TGI = {"parameters": {"grammar": {"type": "json", "value": SCHEMA}}}
NATIVE = {"parameters": {"structured_outputs": {"json": SCHEMA}}}
REASON = "it does not follow `type` at `/a`"
WRONG, GOOD = '{{text={"a":"x"} }}', '{{text={"a":1} }}'


def say(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize(
    ("path", "wrong", "good", "status"),
    [
        ("/results/", {"content": WRONG} | NATIVE, {"content": GOOD} | NATIVE, 200),
        ("/v1/chat/completions", say(WRONG) | OPENAI, say(GOOD) | OPENAI, 502),
        ("/v1/completions", {"prompt": WRONG} | OPENAI, {"prompt": GOOD} | OPENAI, 502),
        ("/v1/messages", say(WRONG) | MESSAGES, say(GOOD) | MESSAGES, 502),
        ("/v1/responses", {"input": WRONG} | RESPONSES, {"input": GOOD} | RESPONSES, 502),
        ("/generate", {"inputs": WRONG} | TGI, {"inputs": GOOD} | TGI, 424),
    ],
)
async def test_a_text_that_does_not_follow_the_schema_fails(
    chat_service: Service, path: str, wrong: Any, good: Any, status: int
) -> None:
    client, headers = chat_service.client, {"Prefer": "wait=30"}
    model = {} if path == "/generate" else {"model": "scripted"}
    right = await client.post(path, json=model | good, headers=headers)
    assert right.status_code in (200, 201), right.text
    assert "invalid_output" not in right.text
    answer = await client.post(path, json=model | wrong, headers=headers)
    assert answer.status_code in (status, status + 1), answer.text
    assert REASON in answer.text
    if path != "/generate":
        assert "invalid_output" in answer.text
    # OpenAI's and Anthropic's clients would generate the text again, and pay for it.
    assert answer.headers.get("x-should-retry", "false") == "false"
    if path == "/results/":
        result = answer.json()
        assert (result["state"], result["result"]) == ("failed", '{"a":"x"}')
        assert result["error"]["retryable"] is False


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/v1/chat/completions", say(WRONG) | OPENAI, "data: [DONE]"),
        ("/v1/messages", say(WRONG) | MESSAGES, "event: error"),
        ("/v1/responses", {"input": WRONG} | RESPONSES, "event: response.failed"),
        ("/generate_stream", {"inputs": WRONG} | TGI, "generation"),
    ],
)
async def test_the_error_is_the_last_event_of_a_stream(
    chat_service: Service, path: str, body: Any, last: str
) -> None:
    more = {} if path == "/generate_stream" else {"model": "scripted", "stream": True}
    answer = await chat_service.client.post(path, json=more | body)
    assert answer.status_code == 200
    end = "".join(answer.text.split("\n\n")[-3:])
    assert REASON in end
    assert last in end


async def test_a_text_that_was_cut_and_any_object(chat_service: Service) -> None:
    """A text that ends by its length is not whole; `json_object` is any object."""
    wanted: dict[str, Any] = {"model": "scripted", "response_format": {"type": "json_object"}}
    codes = []
    for text, more in (('{"b":1} ', {}), ("[1]", {}), ('{"b": 1} ', {"max_tokens": 1})):
        asked = say(f"{{{{text={text}}}}}") | wanted | more
        answer = (await chat_service.client.post("/v1/chat/completions", json=asked)).json()
        choice = answer.get("choices", [{}])[0]
        codes.append(answer.get("error", {}).get("code", choice.get("finish_reason")))
    assert codes == ["stop", "invalid_output", "length"]
