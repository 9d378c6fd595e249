"""Images of messages: their places in the text, and templates that have places for them."""

from typing import Any

import pytest
from pydantic import ValidationError

from app.core.errors import InvalidRequestError
from app.inference.images import (
    Image,
    ImageTemplate,
    measure,
    move_behind_tools,
    to_base64,
    to_parts,
)
from tests.images import RED, data_uri, png, png_uri

IMAGE = {"type": "image"}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def message(content: str, *after: int) -> dict[str, Any]:
    images = [{"url": "data:x,y", "after": one} for one in after]
    return {"role": "user", "content": content, "images": images}


@pytest.mark.parametrize(
    ("content", "after", "parts"),
    [
        ("what", (0,), [IMAGE, text("what")]),
        ("what", (4,), [text("what"), IMAGE]),
        ("", (0,), [IMAGE]),
        ("one\ntwo", (3,), [text("one"), IMAGE, text("two")]),
        ("one\n\ntwo", (3,), [text("one"), IMAGE, text("\ntwo")]),
        ("one\ntwo", (7, 3, 3), [text("one"), IMAGE, IMAGE, text("two"), IMAGE]),
        ("\ntwo", (0,), [IMAGE, text("\ntwo")]),
    ],
)
def test_texts_and_images_are_in_their_order(
    content: str, after: tuple[int, ...], parts: list[dict[str, str]]
) -> None:
    assert to_parts(message(content, *after)) == {"role": "user", "content": parts}


def test_a_message_without_images_stays_a_text() -> None:
    plain = {"role": "user", "content": "x", "name": "n"}
    assert to_parts(plain) == to_parts(plain | {"images": []}) == plain


def test_measures() -> None:
    assert measure([{"content": "x"}]) is measure(None) is None
    messages = [message("x", 0, 1), {"content": "y"}, message("z", 0)]
    assert measure(messages) == {"count": 3, "characters": 3 * len("data:x,y")}


def test_an_image_is_what_its_type_says() -> None:
    assert Image(url=png_uri(RED)).after == 0
    assert to_base64(png_uri(RED)) == png_uri(RED).encode().partition(b",")[2]
    for wrong in (data_uri(png(RED), "image/jpeg"), data_uri(b"RIFF", "image/tiff"), "data:,x"):
        with pytest.raises(ValidationError):
            Image(url=wrong)


@pytest.mark.parametrize(
    ("shown", "takes"),
    [
        (lambda part: "<image>" if part["type"] == "image" else part["text"], True),
        (lambda part: part.get("text", ""), False),  # leaves images out
        (lambda part: str(part), False),  # shows parts as data
        (lambda part: "<image>" if part["type"] == "image" else "", False),  # leaves texts out
    ],
)
async def test_a_template_is_probed_once(shown: Any, takes: bool) -> None:
    count = 0

    async def render(messages: list[dict[str, Any]]) -> str:
        nonlocal count
        count += 1
        return "".join(map(shown, messages[0]["content"]))

    template = ImageTemplate()
    assert [await template.takes(render) for _ in range(3)] == [takes] * 3
    assert count == 2


async def test_a_template_that_refuses_parts_has_no_places() -> None:
    async def render(_messages: list[dict[str, Any]]) -> str:
        raise InvalidRequestError("no")

    assert await ImageTemplate().takes(render) is False


@pytest.mark.parametrize(
    ("of_tool", "takes"),
    [
        (lambda content: "".join(map(place, content)), True),
        (lambda content: str(content), False),  # shows the result as data
        (lambda content: "".join(part.get("text", "") for part in content), False),
    ],
)
async def test_results_of_tools_have_a_probe_of_their_own(of_tool: Any, takes: bool) -> None:
    async def render(messages: list[dict[str, Any]]) -> str:
        shown = [str(one.get("tool_calls")) for one in messages]
        for one in messages:
            content = one["content"]
            if not isinstance(content, str):
                is_tool = one["role"] == "tool"
                shown.append(of_tool(content) if is_tool else "".join(map(place, content)))
        return " ".join(shown)

    template = ImageTemplate()
    assert await template.takes(render) is True
    assert await template.takes(render, of_tools=True) is takes
    assert await template.takes(render) is True


def place(part: dict[str, str]) -> str:
    return "<image>" if part["type"] == "image" else part["text"]


def of_tool(*urls: str) -> dict[str, Any]:
    images = [{"url": url, "after": 2} for url in urls]
    return {"role": "tool", "content": "ok", "images": images}


def start(*urls: str) -> list[dict[str, Any]]:
    return [{"url": url, "after": 0} for url in urls]


@pytest.mark.parametrize("follows", [True, False])
def test_images_of_tools_move_into_the_users_message_behind_them(follows: bool) -> None:
    call, result = {"role": "assistant", "content": ""}, {"role": "tool", "content": "ok"}
    question = {"role": "user", "content": "what", "name": "n"} | {
        "images": [{"url": "d", "after": 4}]
    }
    messages = [call, of_tool("a", "b"), {"role": "tool", "content": "ok"}, of_tool("c")]
    moved = move_behind_tools([*messages, question, call] if follows else [*messages, call])
    images = start("a", "b", "c")
    if follows:
        own = question | {"images": [*images, {"url": "d", "after": 4}]}
    else:
        own = {"role": "user", "content": "", "images": images}
    assert moved == [call, result, result, result, own, call]
    assert move_behind_tools(messages)[-1] == {"role": "user", "content": "", "images": images}
