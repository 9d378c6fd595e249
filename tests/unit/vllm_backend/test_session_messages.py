"""Commands of engine sessions, as the vLLM backend reads them."""

import json
from typing import Any

import pytest

from tests.unit.vllm_backend.modules import load

messages = load("session_messages")

SUBMIT = {"slot": 7, "prompt": "x", "parameters": {}}


def read(*commands: Any) -> Any:
    return messages.read_commands([json.dumps(one).encode() for one in commands])


def test_session_commands_keep_their_order() -> None:
    assert read(
        {"open": {"flush_seconds": 1, "window": 16}},
        {"submit": SUBMIT},
        {"live": [7]},
        {"lazy": [7, 8]},
        {"ack": 0},
        {"cancel": []},
        {"close": True},
    ) == [
        messages.Open(1.0, 16),
        messages.Submit(7, "x", {}, live=False, token_ids=False, resume=None),
        messages.Watch([7], live=True),
        messages.Watch([7, 8], live=False),
        messages.Ack(0),
        messages.Cancel([]),
        messages.Close(),
    ]


def test_optional_members_of_session_commands() -> None:
    resume = {"token_ids": [5, -1], "text": "a"}
    members: dict[str, Any] = {"live": True, "token_ids": True, "resume": resume}
    (command,) = read({"submit": SUBMIT | members})
    assert (command.live, command.token_ids, command.resume) == (True, True, ([5, -1], "a"))
    (command,) = read({"submit": SUBMIT | {"prompt_token_ids": [3, 1]}})
    assert command.prompt_token_ids == [3, 1]
    assert read({"open": {"flush_seconds": 0.0}}) == [messages.Open(0.0, None)]


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b"1" * 5000,
        b"7",
        b"[]",
        b"{}",
        b'{"ack": 1, "close": true}',
    ],
    ids=lambda value: value[:10],
)
def test_a_session_command_that_is_no_object_of_one_member(encoded: bytes) -> None:
    with pytest.raises(messages.MessageError, match=r"^session_commands: command 2: "):
        messages.read_commands([b'{"ack": 1}', encoded])


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ({"stop": 1}, "unknown command 'stop'"),
        ({"open": 1}, "open must be a JSON object"),
        ({"open": {}}, "flush_seconds is required"),
        ({"open": {"flush_seconds": "1"}}, "flush_seconds must be"),
        ({"open": {"flush_seconds": True}}, "flush_seconds must be"),
        ({"open": {"flush_seconds": -1}}, "flush_seconds must be"),
        ({"open": {"flush_seconds": float("nan")}}, "flush_seconds must be"),
        ({"open": {"flush_seconds": float("inf")}}, "flush_seconds must be"),
        ({"open": {"flush_seconds": 1, "window": 0}}, "window must be"),
        ({"open": {"flush_seconds": 1, "window": 1.5}}, "window must be"),
        ({"open": {"flush_seconds": 1, "other": 0}}, "unknown member: other"),
        ({"submit": {"slot": 1}}, "parameters, prompt is required"),
        ({"submit": SUBMIT | {"slot": 0}}, "slot must be"),
        ({"submit": SUBMIT | {"slot": 2**31}}, "slot must be"),
        ({"submit": SUBMIT | {"slot": True}}, "slot must be"),
        ({"submit": SUBMIT | {"prompt": None}}, "prompt must be"),
        ({"submit": SUBMIT | {"parameters": "{}"}}, "parameters must be a JSON object"),
        ({"submit": SUBMIT | {"live": 1}}, "live must be true or false"),
        ({"submit": SUBMIT | {"token_ids": None}}, "token_ids must be true or false"),
        ({"submit": SUBMIT | {"resume": {"token_ids": []}}}, "resume: text is required"),
        ({"submit": SUBMIT | {"resume": {"token_ids": 5, "text": ""}}}, "list of integers"),
        ({"submit": SUBMIT | {"resume": {"token_ids": [2**31], "text": ""}}}, "list of integers"),
        ({"submit": SUBMIT | {"resume": {"token_ids": [], "text": 5}}}, "text must be a string"),
        ({"submit": SUBMIT | {"prompt_token_ids": ["1"]}}, "prompt_token_ids must be a list"),
        ({"cancel": 1}, "cancel must be a list of slots"),
        ({"live": [0]}, "live must be a list of slots"),
        ({"lazy": ["1"]}, "lazy must be a list of slots"),
        ({"ack": -1}, "ack must be"),
        ({"ack": 1.0}, "ack must be"),
        ({"close": 1}, "close must be true"),
    ],
    ids=str,
)
def test_a_wrong_session_command_is_named(command: Any, message: str) -> None:
    with pytest.raises(messages.MessageError, match=f"^session_commands: command 1: .*{message}"):
        read(command)


def test_messages_about_session_commands_are_short() -> None:
    for command in ({"x" * 9000: 1}, {"open": {"flush_seconds": 1, "x" * 9000: 1}}):
        with pytest.raises(messages.MessageError) as caught:
            read(command)
        assert len(str(caught.value)) < 300
