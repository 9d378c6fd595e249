"""Prompts of one model: chat messages to text, and token counts, by the model's own files.

Templates and tokenizers run off the event loop, with bounded time and output.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jinja2
from tokenizers import Tokenizer

from app.core.errors import FieldError, InvalidRequestError, TemplatesBusyError
from app.inference import tokenizer_files as files
from app.inference.bounded_threads import BoundedThreads, ThreadsBusyError
from app.inference.chat_templates import (
    MAX_SECONDS,
    Messages,
    compile_template,
    read_templates,
    render,
    uses_variable,
)
from app.inference.encoding import TokenizedText, count_tokens, tokenize
from app.inference.model_repository import model_length
from app.inference.tool_calls import ToolFormat, detect_format

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")

_RENDER_TIMEOUT_SECONDS = MAX_SECONDS
_QUEUE_SECONDS = 5.0
_MAX_INLINE_CHARACTERS = 2_000  # of a text that is encoded on the event loop

# Two pools: a template that never ends must not block the reading and counting of others.
_RENDERING = BoundedThreads("render", 2)
_READING = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")


@dataclass(slots=True, frozen=True)
class PromptFormat:
    """A model's tokenizer and chat template, read from its directory.

    `leading_token` is the token that the tokenizer itself puts before every text. `tool_template` is
    the template of requests with tools, if the model has its own for them.
    """

    tokenizer: Tokenizer | None
    template: jinja2.Template | None
    special_tokens: dict[str, str]
    max_model_len: int | None
    leading_token: str = ""
    tool_template: jinja2.Template | None = None
    uses_tools: bool = False
    tool_format: ToolFormat | None = None
    knows_developer: bool = False  # the template has a role `developer`
    special_ids: frozenset[int] = frozenset()  # of tokens that are not text, as far as known
    end_ids: frozenset[int] = frozenset()  # of tokens that may end an output; empty: unknown

    @property
    def has_chat(self) -> bool:
        return self.template is not None

    async def render(self, messages: Messages, arguments: Mapping[str, Any] | None = None) -> str:
        """Messages as one prompt that ends where the assistant begins.

        `arguments` are further variables of the template, such as `tools`;
        `continue_final_message` leaves the last message open, to be continued. Raises
        InvalidRequestError with the template's own message if it refuses the messages, and
        TemplatesBusyError if other messages occupy the threads.
        """
        try:
            return await _RENDERING.run(
                partial(self._render, messages, arguments or {}),
                seconds=_RENDER_TIMEOUT_SECONDS,
                queue_seconds=_QUEUE_SECONDS,
            )
        except ThreadsBusyError as error:
            raise TemplatesBusyError(
                f"The messages were not rendered: {error}. Try again later.",
                headers={"Retry-After": "5"},
            ) from None
        except TimeoutError:
            raise _invalid_messages(
                f"the model's chat template took longer than {_RENDER_TIMEOUT_SECONDS:.0f} s"
            ) from None
        except Exception as error:  # a template is a program: it may raise anything
            raise _invalid_messages(f"the model's chat template refused them: {error}") from error

    def for_engine(self, rendered: str) -> str:
        """A rendered prompt as it is sent: the engine's tokenizer adds the leading token itself."""
        return rendered.removeprefix(self.leading_token)

    async def text_of(self, tokens: Sequence[int]) -> str | None:
        """The text that the engine encodes as exactly these tokens, or None; also for too many."""
        if self.max_model_len is not None and len(tokens) > self.max_model_len:
            return None
        return await asyncio.get_running_loop().run_in_executor(_READING, self._text_of, tokens)

    async def count_tokens(self, prompt: str) -> int | None:
        """Tokens of a prompt as the engine counts them, or None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return await _read(len(prompt), partial(count_tokens, self.tokenizer, prompt))

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> TokenizedText | None:
        if self.tokenizer is None:
            return None
        encode = partial(tokenize, self.tokenizer, text, add_special_tokens=add_special_tokens)
        return await _read(len(text), encode)

    def _text_of(self, tokens: Sequence[int]) -> str | None:
        if self.tokenizer is None or max(tokens) >= self.tokenizer.get_vocab_size():
            return None
        # Batches, of one: unlike single calls they work without the interpreter's lock.
        (text,) = self.tokenizer.decode_batch([list(tokens)], skip_special_tokens=False)
        for one in (text.removeprefix(self.leading_token), text):
            (encoding,) = self.tokenizer.encode_batch([one])
            if encoding.ids == list(tokens):
                return one
        return None

    def _render(self, messages: Messages, arguments: Mapping[str, Any]) -> str:
        variables = {"tools": None, "documents": None, "add_generation_prompt": True}
        variables |= self.special_tokens | dict(arguments)
        has_tools = variables["tools"] is not None
        template = self.tool_template if has_tools and self.tool_template else self.template
        assert template is not None
        return render(template, messages, variables)


async def _read(characters: int, work: Callable[[], _Value]) -> _Value:
    """The value of `work` on a text of so many characters: inline if that is short."""
    if characters < _MAX_INLINE_CHARACTERS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_READING, work)


class PromptFormats:
    """The formats of a model repository, read once each; a model without files is text-only."""

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        self._formats: dict[str, PromptFormat | None] = {}

    async def get(self, model: str) -> PromptFormat | None:
        if model not in self._formats:
            loop = asyncio.get_running_loop()
            self._formats[model] = await loop.run_in_executor(_READING, self._read, model)
        return self._formats[model]

    def _read(self, model: str) -> PromptFormat | None:
        try:
            return read_format(self._repository, model)
        # The tokenizer's errors are plain Exceptions: a half-written file must not end the process.
        except Exception as error:  # noqa: BLE001
            logger.warning(
                "model %s is text-only: its tokenizer or template cannot be read: %s",
                model,
                error,
                extra={"action": "format_unreadable"},
            )
            return None


def read_format(repository: Path, model: str) -> PromptFormat | None:
    newest = files.newest_version(repository, model)
    if newest is None:
        return None
    engine = files.read_json(newest)
    weights = files.weights_directory(repository, newest.parent, str(engine.get("model", "")))
    if weights is None:
        return PromptFormat(None, None, {}, engine.get("max_model_len"))
    tokenizer_file = weights / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(tokenizer_file)) if tokenizer_file.exists() else None
    config = files.read_json(weights / "tokenizer_config.json")
    tokens = files.special_tokens(files.read_json(weights / "special_tokens_map.json") | config)
    templates = read_templates(weights, config)
    with_tools = templates.get("tool_use") or templates.get("default", "")
    declared = files.read_json(repository / model / "chat.json").get("tool_call_format")
    return PromptFormat(
        tokenizer=tokenizer,
        template=compile_template(templates.get("default")),
        special_tokens=tokens,
        max_model_len=engine.get("max_model_len")
        or model_length(files.read_json(weights / "config.json")),
        leading_token=files.leading_token(tokenizer, tokens.get("bos_token")),
        tool_template=compile_template(templates.get("tool_use")),
        uses_tools=uses_variable(with_tools, "tools"),
        tool_format=ToolFormat(declared) if declared else detect_format(with_tools),
        knows_developer="developer" in with_tools,
        special_ids=files.special_ids(tokenizer),
        end_ids=files.end_ids(tokenizer, tokens.get("eos_token"), weights),
    )


def _invalid_messages(reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"The messages cannot be rendered: {reason}.", errors=[FieldError("messages", reason)]
    )
