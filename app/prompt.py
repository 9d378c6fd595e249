"""Prompts and tokenizers: chat messages to a prompt, and token counts, by the model's own files.

Templates come from the operator's models alone, never from a request. They run off the event loop
in an immutable sandbox, with time and output bounded.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import orjson
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Encoding, Tokenizer

from app.errors import FieldError, InvalidRequestError
from app.model_repository import model_length

logger = logging.getLogger(__name__)

_RENDER_TIMEOUT = 5.0  # seconds
_MAX_RENDERED = 4_000_000  # characters

# Two pools: a template that never ends must not keep others from being read and counted.
_RENDERING = ThreadPoolExecutor(max_workers=2, thread_name_prefix="render")
_READING = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")


@dataclass(slots=True, frozen=True)
class PromptFormat:
    """How one model's prompts are made and counted, read from its directory."""

    tokenizer: Tokenizer | None
    template: jinja2.Template | None
    special_tokens: dict[str, str]
    max_model_len: int | None
    special_ids: frozenset[int] = frozenset()  # of tokens that are no text, as far as known
    end_ids: frozenset[int] = frozenset()  # of tokens that may end an answer; empty: unknown

    @property
    def has_chat(self) -> bool:
        return self.template is not None

    async def render(
        self, messages: list[dict[str, Any]], arguments: Mapping[str, Any] | None = None
    ) -> str:
        """Messages as one prompt that ends where the assistant begins.

        `arguments` are further variables of the template, such as `tools`. Raises InvalidRequestError with the template's own words where it refuses the messages.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_RENDER_TIMEOUT):
                return await loop.run_in_executor(
                    _RENDERING, self._render, messages, arguments or {}
                )
        except TimeoutError:
            raise _invalid_messages(
                f"the model's chat template took longer than {_RENDER_TIMEOUT:.0f} s"
            ) from None
        except Exception as error:  # a template is a program: it may raise anything
            raise _invalid_messages(f"the model's chat template refused them: {error}") from error

    async def count_tokens(self, prompt: str) -> int | None:
        """Tokens of a prompt as the engine counts them, or None without a tokenizer."""
        encoding = await self.encode(prompt)
        return None if encoding is None else len(encoding.ids)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> Encoding | None:
        """A text's tokens, with those the engine puts around it, or None without a tokenizer."""
        if self.tokenizer is None:
            return None
        encode = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        if len(text) < 2_000:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(_READING, encode)

    def _render(self, messages: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
        assert self.template is not None
        pieces, size = [], 0
        for piece in self._generate(messages, arguments):
            size += len(piece)
            if size > _MAX_RENDERED:
                raise ValueError(f"more than {_MAX_RENDERED} characters")
            pieces.append(piece)
        return "".join(pieces)

    def _generate(
        self, messages: list[dict[str, Any]], arguments: Mapping[str, Any]
    ) -> Iterator[str]:
        assert self.template is not None
        return self.template.generate(
            **{"add_generation_prompt": True, **self.special_tokens, **arguments},
            messages=messages,
        )


class PromptFormats:
    """The formats of a model repository, read once each; absent files make a model text-only."""

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        self._formats: dict[str, PromptFormat | None] = {}

    async def get(self, model: str) -> PromptFormat | None:
        """The model's format, or None where the repository has no such model."""
        if model not in self._formats:
            loop = asyncio.get_running_loop()
            self._formats[model] = await loop.run_in_executor(_READING, self._read, model)
        return self._formats[model]

    def _read(self, model: str) -> PromptFormat | None:
        try:
            return read_format(self._repository, model)
        # Also the tokenizer's own, which are plain Exceptions: a half-written file must not end us.
        except Exception as error:  # noqa: BLE001
            logger.warning(
                "model %s is text-only: its tokenizer or template cannot be read: %s",
                model,
                error,
                extra={"action": "format_unreadable"},
            )
            return None


def read_format(repository: Path, model: str) -> PromptFormat | None:
    """Read tokenizer, chat template and length from a model repository entry."""
    found = [
        file for file in (repository / model).glob("*/model.json") if file.parent.name.isdigit()
    ]
    if not found:
        return None
    newest = max(found, key=lambda file: int(file.parent.name))
    engine = _read_json(newest)
    weights = _weights_directory(repository, newest.parent, str(engine.get("model", "")))
    if weights is None:
        return PromptFormat(None, None, {}, engine.get("max_model_len"))
    tokenizer_file = weights / "tokenizer.json"
    config = _read_json(weights / "tokenizer_config.json")
    tokenizer = Tokenizer.from_file(str(tokenizer_file)) if tokenizer_file.exists() else None
    special_tokens = _special_tokens(config)
    return PromptFormat(
        tokenizer=tokenizer,
        template=_template(weights, config),
        special_tokens=special_tokens,
        max_model_len=engine.get("max_model_len")
        or model_length(_read_json(weights / "config.json")),
        special_ids=_special_ids(tokenizer),
        end_ids=_end_ids(tokenizer, special_tokens.get("eos_token"), weights),
    )


def _weights_directory(repository: Path, version: Path, model: str) -> Path | None:
    """Where the weights lie: `models/<name>/1` is relative to the folder above the repository."""
    candidates = [Path(model), version]
    if model.startswith("models/"):
        candidates.insert(0, repository / model.removeprefix("models/"))
    for candidate in candidates:
        if model and (candidate / "config.json").is_file():
            return candidate
    return None


def _read_json(path: Path) -> dict[str, Any]:
    value = orjson.loads(path.read_bytes()) if path.is_file() else {}
    if not isinstance(value, dict):
        raise TypeError(f"{path.name} is not a JSON object")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def _special_ids(tokenizer: Tokenizer | None) -> frozenset[int]:
    if tokenizer is None:
        return frozenset()
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(identifier for identifier, token in added.items() if token.special)


def _end_ids(tokenizer: Tokenizer | None, name: str | None, weights: Path) -> frozenset[int]:
    """The ids that the model's files name as ends: the engine stops at some of them."""
    named = tokenizer.token_to_id(name) if tokenizer is not None and name else None
    found = {named} - {None}
    for file in ("config.json", "generation_config.json"):
        given = _read_json(weights / file).get("eos_token_id")
        found |= set(given if isinstance(given, list) else [given]) - {None}
    return frozenset(identifier for identifier in found if isinstance(identifier, int))


def _template(weights: Path, config: dict[str, Any]) -> jinja2.Template | None:
    file = weights / "chat_template.jinja"
    source = file.read_text() if file.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = next((item["template"] for item in source if item["name"] == "default"), None)
    if not source:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols],
        autoescape=False,
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
    return environment.from_string(source)


def _to_json(value: object, indent: int | None = None) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 if indent else None).decode()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _invalid_messages(reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"The messages cannot be rendered: {reason}.", errors=[FieldError("messages", reason)]
    )
