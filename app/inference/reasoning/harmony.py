"""Messages on channels: `<|channel|>analysis<|message|>...<|end|>` (gpt-oss, Harmony).

Messages on `analysis` are reasoning, those to `functions.NAME` are calls, those on `final` and on
`commentary` that have no recipient are content. The notation has calls and reasoning in one: this
reader finds both.

https://cookbook.openai.com/articles/openai-harmony
"""

import json
import re
from typing import Literal

from app.inference.reasoning.reader import Format, Piece, Reasoning, ReasoningReader
from app.inference.tool_calls.source import ToolCall

_CHANNEL, _MESSAGE = "<|channel|>", "<|message|>"
_TOKEN = re.compile(r"<\|(?:channel|message|start|end|return|call|constrain)\|>")
_LONGEST = len("<|constrain|>")
_MAX_HEADER = 1024  # characters; a longer one is content
_CALL = re.compile(r"(?:^|\s)to=functions\.([A-Za-z0-9_.-]{1,256})")
_ANY_RECIPIENT = re.compile(r"(?:^|\s)to=\S")

_Kind = Literal["reasoning", "content", "call", "other"]


class HarmonyReader:
    """Reads messages until the text's end; a message's end may be missing there.

    The prompt ends behind `<|start|>assistant`: the text begins within a header. Text that has no
    message is content.
    """

    def __init__(self) -> None:
        self._buffer = ""  # not more than a token's beginning
        self._header: list[str] | None = [""]  # None: inside of a message
        self._header_size = 0
        self._kind: _Kind = "content"
        self._name = ""
        self._arguments: list[str] = []
        self._pieces: list[Piece] = []
        self._counts = {"reasoning": 0, "content": 0}  # messages with text
        self._has_text = False

    def feed(self, text: str) -> list[Piece]:
        self._read(text, is_end=False)
        return self._take()

    def finish(self) -> list[Piece]:
        self._read("", is_end=True)
        self._end_header()
        self._end_message()
        return self._take()

    def _read(self, text: str, *, is_end: bool) -> None:
        buffer, at = self._buffer + text, 0
        for found in _TOKEN.finditer(buffer):
            self._read_text(buffer[at : found.start()])
            self._read_token(found[0])
            at = found.end()
        held = 0 if is_end else _beginning(buffer, at)
        self._read_text(buffer[at : len(buffer) - held])
        self._buffer = buffer[len(buffer) - held :]

    def _read_text(self, text: str) -> None:
        if not text:
            return
        if self._header is None:
            self._emit(text)
            return
        self._header.append(text)
        self._header_size += len(text)
        if self._header_size > _MAX_HEADER:
            self._begin_text("".join(self._header))

    def _read_token(self, token: str) -> None:
        if self._header is not None and token == _MESSAGE:
            self._begin_message("".join(self._header))
        elif self._header is not None and token in (_CHANNEL, "<|constrain|>"):
            self._read_text(token)
        else:
            self._end_header()
            self._end_message()
            self._header, self._header_size = [], 0
            if token == _CHANNEL:
                self._read_text(token)

    def _begin_message(self, header: str) -> None:
        self._header = None
        self._kind = _kind_of(header)
        self._has_text = False
        called = _CALL.search(header.replace("<|", " <|"))
        self._name = called[1] if called else ""

    def _end_header(self) -> None:
        """A header that no message follows is text, unless it is one of this notation."""
        header = "".join(self._header or ()).strip()
        if header not in ("", "assistant") and _CHANNEL not in header:
            self._begin_text("".join(self._header or ()))

    def _begin_text(self, text: str) -> None:
        self._header, self._kind, self._has_text = None, "content", False
        self._emit(text)

    def _emit(self, text: str) -> None:
        if self._kind == "call":
            self._arguments.append(text)
        elif self._kind != "other":
            if not self._has_text:  # messages of one kind are lines
                text = ("\n" if self._counts[self._kind] else "") + text
                self._counts[self._kind] += 1
                self._has_text = True
            self._pieces.append(Reasoning(text) if self._kind == "reasoning" else text)

    def _end_message(self) -> None:
        if self._header is None and self._kind == "call":
            self._pieces.append(ToolCall(self._name, _arguments_of("".join(self._arguments))))
            self._arguments = []
        self._kind = "content"

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces


def _kind_of(header: str) -> _Kind:
    channel = header.partition(_CHANNEL)[2].split(maxsplit=1)
    name = channel[0].partition("<|")[0] if channel else ""
    spaced = header.replace("<|", " <|")
    if _CALL.search(spaced):
        return "call"
    if name == "analysis":
        return "reasoning"
    is_content = name == "final" or (name == "commentary" and not _ANY_RECIPIENT.search(spaced))
    return "content" if is_content else "other"


def _arguments_of(text: str) -> str:
    """The arguments as the other formats write them; as the model wrote them if they are not JSON."""
    try:
        value = json.loads(text)
        arguments = json.dumps(value, ensure_ascii=False, allow_nan=False)
        arguments.encode()
    except (ValueError, RecursionError):
        return text
    return arguments


def _beginning(text: str, at: int) -> int:
    """The number of characters at the text's end that may be the beginning of a token."""
    begins = text.rfind("<", max(at, len(text) - _LONGEST + 1))
    return len(text) - begins if begins >= 0 and "<|".startswith(text[begins : begins + 2]) else 0


def _new_reader(_is_open: bool, _ends: tuple[str, ...]) -> ReasoningReader:
    return HarmonyReader()


FORMAT = Format(
    "harmony",
    "<|channel|>analysis<|message|>",
    "<|end|>",
    lambda template: _CHANNEL in template and _MESSAGE in template,
    _new_reader,
)
