"""Images of Anthropic's messages, OpenAI's chats and responses: their places among the texts."""

import time
from typing import Any

import orjson
import pytest

from app.api.anthropic.schemas import MessageRequest
from app.api.json_codec import parse
from app.api.openai.chat_schemas import ChatRequest
from app.api.openai.responses_input import count_images, with_images, without_images
from app.api.openai.responses_schemas import ResponseCreate
from app.core.errors import InvalidRequestError
from tests.images import BLUE, RED, block, chat_part, input_part, is_image, png_uri

# Parts of one user's message; data URIs are images.
CONTENTS = (
    ("one", png_uri(RED), "two"),
    (png_uri(RED), "one", png_uri(BLUE)),
    ("one", "two", png_uri(BLUE), png_uri(RED), "three", "four"),
    (png_uri(BLUE),),
    ("one", png_uri(RED)),
    ("one", "two"),
)


def by_chat(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    request = parse(ChatRequest, orjson.dumps({"model": "m", "messages": messages}))
    return request.to_messages(None)


def by_messages(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    body = {"model": "m", "max_tokens": 1, "messages": messages}
    return parse(MessageRequest, orjson.dumps(body)).to_messages(None)


def response(*items: dict[str, Any]) -> ResponseCreate:
    return parse(ResponseCreate, orjson.dumps({"model": "m", "input": items}))


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize("parts", CONTENTS)
def test_a_message_is_the_same_in_each_dialect(parts: tuple[str, ...]) -> None:
    expected = by_chat(user(list(map(chat_part, parts))))
    assert by_messages(user(list(map(block, parts)))) == expected
    items = response(user(list(map(input_part, parts))))
    assert items.to_chat().to_messages(None) == expected


@pytest.mark.parametrize("cut", range(7))
@pytest.mark.parametrize("parts", CONTENTS)
def test_consecutive_messages_are_as_one(parts: tuple[str, ...], cut: int) -> None:
    whole = by_messages(user(list(map(block, parts))))
    halves = [user(list(map(block, half))) for half in (parts[:cut], parts[cut:])]
    assert by_messages(*halves) == whole


@pytest.mark.parametrize("parts", CONTENTS)
def test_the_result_of_a_tool_has_images(parts: tuple[str, ...]) -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
    expected = by_chat(
        user("x"),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": list(map(chat_part, parts))},
        user([chat_part(png_uri(BLUE)), chat_part("after")]),
    )
    result = {"type": "tool_result", "tool_use_id": "a", "content": list(map(block, parts))}
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    found = by_messages(
        user("x"),
        {"role": "assistant", "content": [use]},
        user([result, block(png_uri(BLUE)), block("after")]),
    )
    assert found == expected
    items = response(
        user("x"),
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": list(map(input_part, parts))},
        user([input_part(png_uri(BLUE)), input_part("after")]),
    )
    assert items.to_chat().to_messages(None) == expected


@pytest.mark.parametrize("parts", CONTENTS)
def test_items_are_stored_without_their_images_and_get_them_back(parts: tuple[str, ...]) -> None:
    create = response(
        user("x"),
        user(list(map(input_part, parts))),
        {"type": "function_call_output", "call_id": "a", "output": list(map(input_part, parts))},
        user([input_part(png_uri(RED))]),
    )
    stored = without_images(create.input)
    assert b"base64" not in orjson.dumps(stored)
    assert count_images(stored) == 2 * sum(map(is_image, parts)) + 1
    earlier = by_chat(user([chat_part(png_uri(BLUE))] * 3))
    messages = [*earlier, *create.to_chat().to_messages(None)]
    assert with_images(stored, messages) == create.input
    erased = with_images(stored, [])
    assert [one["image_url"] for one in erased[-1]["content"]] == [None]


def test_texts_between_images_are_lines() -> None:
    (item,) = response(user([*map(input_part, CONTENTS[2])])).input
    assert item["content"] == [
        input_part(part) for part in ("one\ntwo", png_uri(BLUE), png_uri(RED), "three\nfour")
    ]


SOURCE = block(png_uri(RED))["source"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"type": "url", "url": "ftp://example.org/a.png"}, "must begin with http:// or https://"),
        ({"type": "url", "url": png_uri(RED)}, "must begin with http:// or https://"),
        ({"type": "url", "url": "http://example.org/" + 2_030 * "a"}, "at most 2048 characters"),
        ({"type": "url"}, "required"),
        ({"type": "file", "file_id": "f"}, "a source of type 'file' is not supported"),
        ({}, "a source of type 'None' is not supported"),
        ("x", "should be an object"),
        (SOURCE | {"media_type": "image/svg+xml"}, "'image/jpeg', 'image/png', 'image/gif' or 'image/webp'"),
        (SOURCE | {"media_type": "image/gif"}, "the content is not of type image/gif"),
        (SOURCE | {"data": "!"}, "is not base64"),
        (SOURCE | {"data": SOURCE["data"][:-1]}, "is not base64"),
        (SOURCE | {"data": "\u00e9"}, "is not base64"),
        (SOURCE | {"data": 7}, "valid string"),
    ],
)  # fmt: skip
def test_wrong_sources_are_refused(source: Any, words: str) -> None:
    wrong = {"type": "image", "source": source}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [wrong]}
    for content in ([wrong], [result]):
        with pytest.raises(InvalidRequestError) as caught:
            by_messages(user(content))
        assert words in caught.value.errors[0].message


@pytest.mark.parametrize("role", ["assistant", "system", "developer"])
def test_images_are_of_users(role: str) -> None:
    if role != "developer":
        with pytest.raises(InvalidRequestError) as caught:
            by_messages({"role": role, "content": [block(png_uri(RED))]})
        words = f"block 0 is of type image, which the role {role} cannot have"
        assert words in caught.value.errors[0].message
    with pytest.raises(InvalidRequestError) as caught:
        response({"role": role, "content": [input_part(png_uri(RED))]})
    words = (
        f"item 0 has an image in a message with the role {role}: images are taken in messages with"
    )
    assert words in caught.value.errors[0].message


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"image_url": "file:///etc/passwd"}, "wrong image_url: must be `data:TYPE;base64,...`"),
        ({"image_url": "http://example.org/" + 2_030 * "a"}, "at most 2048 characters"),
        ({"image_url": "data:image/svg+xml;base64,PHN2Zz4="}, "must be `data:TYPE;base64,...`"),
        ({"image_url": "data:image/png;base64,!"}, "is not base64"),
        ({"image_url": png_uri(RED).replace("png", "gif")}, "the content is not of type image/gif"),
        ({"file_id": "file-1"}, "file_id, which is not supported"),
        ({"image_url": png_uri(RED), "file_id": "file-1"}, "file_id, which is not supported"),
        ({"image_url": {"url": png_uri(RED)}}, "an image without image_url"),
        ({}, "an image without image_url"),
    ],
)
def test_wrong_parts_are_refused(part: dict[str, Any], words: str) -> None:
    wrong = {"type": "input_image"} | part
    output = {"type": "function_call_output", "call_id": "a", "output": [wrong]}
    for item in (user([wrong]), output):
        with pytest.raises(InvalidRequestError) as caught:
            response(item)
        (error,) = caught.value.errors
        assert (error.field, words in error.message) == ("input", True), error


def test_the_time_of_a_request_grows_with_its_parts_alone() -> None:
    """Tens of thousands of texts and images by turns: the refusal takes a second at most."""
    wrong = {"type": "image_url", "image_url": {"url": ""}}
    content = [{"type": "text", "text": "x"}, wrong] * 20_000
    began = time.process_time()
    with pytest.raises(InvalidRequestError):
        by_chat(user(content))
    for make, part in ((by_messages, block), (response, input_part)):
        parts = [part("x"), part(png_uri(RED))] * 4_000
        make(user(parts))
    assert time.process_time() - began < 3
