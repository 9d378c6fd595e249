"""Prompts of one model: chat messages to text, and token counts, by the model's own files.

Templates and tokenizers run off the event loop, with bounded time and output.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jinja2
from tokenizers import Tokenizer

from app.core.background_threads import background_threads
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
from app.inference.image_tokens import ImageRule, count_images, read_image_rule
from app.inference.images import ImageTemplate, uris_of
from app.inference.model_repository import model_length
from app.inference.pooling import Task, model_task
from app.inference.reasoning import ReasoningFormat, ReasoningUse, detect_reasoning
from app.inference.reasoning.probe import OpenPrompts
from app.inference.tool_calls import ToolFormat, detect_format

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")

_RENDER_TIMEOUT_SECONDS = MAX_SECONDS
_QUEUE_SECONDS = 5.0
_MAX_INLINE_CHARACTERS = 2_000  # of a text that is encoded on the event loop

# Names that templates have for the reasoning of an assistant's message.
_REASONING_MEMBERS = ("reasoning_content", "reasoning", "thinking")

# Two pools: a template that never ends must not block the reading and counting of others.
_RENDERING = BoundedThreads("render", 2)
_READING = background_threads("tokenize", 2)


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
    has_special_calls: bool = False  # the openings of calls: texts lack them by default
    knows_developer: bool = False  # the template has a role `developer`
    special_ids: frozenset[int] = frozenset()  # of tokens that are not text, as far as known
    end_ids: frozenset[int] = frozenset()  # of tokens that may end an output; empty: unknown
    reasoning: ReasoningFormat | None = None
    has_special_tags: bool = False  # those of reasoning: texts lack them by default
    constrains_reasoning: bool = True  # a structured output begins with the first token
    reasoning_members: tuple[str, ...] = ()  # of an earlier answer's reasoning, in the template
    default_parameters: Mapping[str, float] | None = None  # of sampling; None: unknown
    task: Task | None = None  # of a pooling model; None: it generates text
    revision: str = ""  # digest of its files; empty: unknown
    has_vision: bool = False  # the model itself; whether its template has places is seen on use
    image_rule: ImageRule | None = None  # None: tokens of images are unknown
    _images: ImageTemplate = field(default_factory=ImageTemplate, compare=False, repr=False)
    _open_prompts: OpenPrompts = field(default_factory=OpenPrompts, compare=False, repr=False)

    @property
    def has_chat(self) -> bool:
        return self.template is not None

    async def takes_images(self) -> bool:
        """Raises TemplatesBusyError."""
        return self.has_vision and self.has_chat and await self._images.takes(self.render)

    async def takes_images_of_tools(self) -> bool:
        """Return if the template has places for images in results of tools.

        Raises TemplatesBusyError.
        """
        return await self._images.takes(self.render, of_tools=True)

    async def image_tokens(self, messages: Messages) -> int | None:
        """Tokens that the images of messages add to the rendered prompt; None: unknown."""
        if self.image_rule is None:
            return None
        uris = uris_of(messages)
        return await _read(sum(map(len, uris)), partial(count_images, self.image_rule, uris))

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

    async def reasoning_use(
        self,
        messages: Messages,
        arguments: Mapping[str, Any] | None = None,
        *,
        ends: tuple[str, ...] = (),
    ) -> ReasoningUse | None:
        """The rules to split the results of messages; None if the model's format has no reasoning.

        The arguments are those of `render`; `ends` are openings of tool calls. Raises
        TemplatesBusyError.
        """
        if self.reasoning is None:
            return None
        is_open = await self._open_prompts.is_open(
            self.reasoning, self.render, messages[-1], arguments or {}
        )
        return ReasoningUse(self.reasoning, is_open, ends)

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

    def count_bare_tokens(self, text: str) -> int:
        """Tokens of a part of an output, without those that the tokenizer adds to a prompt."""
        assert self.tokenizer is not None
        (encoding,) = self.tokenizer.encode_batch([text], add_special_tokens=False)
        return len(encoding.ids)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> TokenizedText | None:
        if self.tokenizer is None:
            return None
        encode = partial(tokenize, self.tokenizer, text, add_special_tokens=add_special_tokens)
        return await _read(len(text), encode)

    async def first_token(self, text: str) -> str:
        """The text of the first token that the engine reads of a prompt; empty if unknown."""
        if self.tokenizer is None:
            return ""
        return await _read(len(text), partial(self._first_token, text))

    async def decode(self, tokens: Sequence[int]) -> str | None:
        """The text of tokens, special ones included; None for ids that the model does not have."""
        too_many = self.max_model_len is not None and len(tokens) > self.max_model_len
        if self.tokenizer is None or too_many or max(tokens) >= self.tokenizer.get_vocab_size():
            return None
        decode = partial(self.tokenizer.decode_batch, [list(tokens)], skip_special_tokens=False)
        (text,) = await asyncio.get_running_loop().run_in_executor(_READING, decode)
        return str(text)

    def _first_token(self, text: str) -> str:
        assert self.tokenizer is not None
        (encoding,) = self.tokenizer.encode_batch([text])
        (first,) = self.tokenizer.decode_batch([encoding.ids[:1]], skip_special_tokens=False)
        return str(first)

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
    """The formats of model repositories, read once each; a model without files is text-only."""

    def __init__(self, *repositories: Path) -> None:
        self._repositories = repositories
        self._formats: dict[str, PromptFormat | None] = {}

    async def get(self, model: str) -> PromptFormat | None:
        if model not in self._formats:
            loop = asyncio.get_running_loop()
            self._formats[model] = await loop.run_in_executor(_READING, self._read, model)
        return self._formats[model]

    def _read(self, model: str) -> PromptFormat | None:
        try:
            return read_format(files.repository_with(self._repositories, model), model)
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
    defaults = files.default_parameters(repository, engine, weights)
    revision = files.revision(newest, weights)
    if weights is None:
        length, task = engine.get("max_model_len"), model_task(engine, {})
        return PromptFormat(
            *(None, None, {}, length), task=task, default_parameters=defaults, revision=revision
        )
    model_config = files.read_json(weights / "config.json")
    tokenizer_file = weights / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(tokenizer_file)) if tokenizer_file.exists() else None
    config = files.read_json(weights / "tokenizer_config.json")
    tokens = files.special_tokens(files.read_json(weights / "special_tokens_map.json") | config)
    templates = read_templates(weights, config)
    with_tools = templates.get("tool_use") or templates.get("default", "")
    declared = files.read_json(repository / model / "chat.json")
    named = declared.get("tool_call_format")
    tool_format = ToolFormat(named) if named else detect_format(with_tools)
    reasoning = _reasoning_of(declared.get("reasoning_format", "auto"), templates)
    return PromptFormat(
        tokenizer=tokenizer,
        has_vision="vision_config" in model_config,
        image_rule=read_image_rule(weights, engine, declared.get("image_tokens"), tokenizer),
        template=compile_template(templates.get("default")),
        special_tokens=tokens,
        max_model_len=engine.get("max_model_len") or model_length(model_config),
        leading_token=files.leading_token(tokenizer, tokens.get("bos_token")),
        tool_template=compile_template(templates.get("tool_use")),
        uses_tools=uses_variable(with_tools, "tools"),
        tool_format=tool_format,
        has_special_calls=tool_format is not None
        and files.has_special_token(tokenizer, *tool_format.definition.openings),
        knows_developer="developer" in with_tools,
        special_ids=files.special_ids(tokenizer),
        end_ids=files.end_ids(tokenizer, tokens.get("eos_token"), weights),
        reasoning=reasoning,
        has_special_tags=reasoning is not None
        and files.has_special_token(tokenizer, reasoning.definition.opening),
        reasoning_members=tuple(
            one for one in _REASONING_MEMBERS if _names_member(with_tools, one)
        ),
        constrains_reasoning=not _engine_parses_reasoning(engine),
        default_parameters=defaults,
        task=model_task(engine, model_config),
        revision=revision,
    )


def _reasoning_of(declared: Any, templates: Mapping[str, str]) -> ReasoningFormat | None:
    if declared == "off":
        return None
    if declared == "auto":
        return detect_reasoning("\n".join(templates.values()))
    return ReasoningFormat(declared)


def _names_member(template: str, name: str) -> bool:
    return re.search(rf"""(?:\.|\[['"]|get\(['"]){name}\b""", template) is not None


def _engine_parses_reasoning(engine: Mapping[str, Any]) -> bool:
    """Return if vLLM's structured outputs begin behind the reasoning."""
    constraints = engine.get("structured_outputs_config")
    given = constraints.get("reasoning_parser") if isinstance(constraints, dict) else None
    return bool(given or engine.get("reasoning_parser"))


def _invalid_messages(reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"The messages cannot be rendered: {reason}.", errors=[FieldError("messages", reason)]
    )
