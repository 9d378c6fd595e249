"""Prompts and tokenizers: chat messages to a prompt, and token counts, by the model's own files.

Templates come from the operator's models alone, never from a request. They run off the event loop
in an immutable sandbox, with time and output bounded. What a template sees and what it may use is
what transformers gives it (https://huggingface.co/docs/transformers/chat_templating).
"""

import asyncio
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import orjson
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Encoding, Tokenizer

from app.core.errors import FieldError, InvalidRequestError
from app.inference.model_repository import model_length
from app.inference.tool_calls import ToolFormat, detect_format

logger = logging.getLogger(__name__)

_RENDER_TIMEOUT = 5.0  # seconds
_MAX_RENDERED = 4_000_000  # characters
_SPECIAL_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
# Where a message that is to be continued ends, in the rendered text.
_CONTINUE_HERE = "CONTINUE_FINAL_MESSAGE_TAG "

# Two pools: a template that never ends must not keep others from being read and counted.
_RENDERING = ThreadPoolExecutor(max_workers=2, thread_name_prefix="render")
_READING = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")


@dataclass(slots=True, frozen=True)
class PromptFormat:
    """How one model's prompts are made and counted, read from its directory.

    `leading_token` is what the tokenizer puts before every text by itself. `tool_template` is the
    template of requests with tools, where the model has one of its own for them.
    """

    tokenizer: Tokenizer | None
    template: jinja2.Template | None
    special_tokens: dict[str, str]
    max_model_len: int | None
    leading_token: str = ""
    tool_template: jinja2.Template | None = None
    uses_tools: bool = False
    tool_format: ToolFormat | None = None
    knows_developer: bool = False
    special_ids: frozenset[int] = frozenset()  # of tokens that are no text, as far as known
    end_ids: frozenset[int] = frozenset()  # of tokens that may end an answer; empty: unknown

    @property
    def has_chat(self) -> bool:
        return self.template is not None

    async def render(
        self, messages: list[dict[str, Any]], arguments: Mapping[str, Any] | None = None
    ) -> str:
        """Messages as one prompt that ends where the assistant begins.

        `arguments` are further variables of the template, such as `tools`;
        `continue_final_message` leaves the last message open, to be continued. Raises
        InvalidRequestError with the template's own words where it refuses the messages.
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

    def for_engine(self, rendered: str) -> str:
        """A rendered prompt as it is sent: the engine's tokenizer adds its leading token itself."""
        return rendered.removeprefix(self.leading_token)

    async def text_of(self, tokens: Sequence[int]) -> str | None:
        """The text that the engine's tokenizer makes exactly these tokens of; None: there is none."""
        return await asyncio.get_running_loop().run_in_executor(_READING, self._text_of, tokens)

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

    def _text_of(self, tokens: Sequence[int]) -> str | None:
        if self.tokenizer is None or max(tokens) >= self.tokenizer.get_vocab_size():
            return None
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=False)
        for one in (text.removeprefix(self.leading_token), text):
            if self.tokenizer.encode(one).ids == list(tokens):
                return one
        return None

    def _render(self, messages: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
        variables = {"tools": None, "documents": None, "add_generation_prompt": True}
        variables |= self.special_tokens | dict(arguments)
        if not variables.pop("continue_final_message", False):
            return self._to_text(messages, variables)
        if variables["add_generation_prompt"]:
            raise ValueError("to continue the final message, set add_generation_prompt to false")
        return self._to_continue(messages, variables)

    def _to_continue(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """The text up to the end of the last message, as transformers finds that."""
        marked = deepcopy(messages)
        final = marked[-1].get("content")
        if not isinstance(final, str):
            raise TypeError("the final message has no content to continue")
        marked[-1]["content"] = final + _CONTINUE_HERE
        text = self._to_text(marked, variables)
        place = text.rfind(_CONTINUE_HERE.strip())
        if place < 0 or final.strip() not in text:
            raise ValueError("the template changes the final message: it cannot be continued")
        is_whole = text.startswith(_CONTINUE_HERE, place)
        return text[:place] if is_whole else text[:place].rstrip()

    def _to_text(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        pieces, size = [], 0
        for piece in self._generate(messages, variables):
            size += len(piece)
            if size > _MAX_RENDERED:
                raise ValueError(f"more than {_MAX_RENDERED} characters")
            pieces.append(piece)
        return "".join(pieces)

    def _generate(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> Iterator[str]:
        has_own = variables["tools"] is not None and self.tool_template is not None
        template = self.tool_template if has_own else self.template
        assert template is not None
        return template.generate(variables, messages=messages)


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


def tokenizer_file(repository: Path, model: str) -> Path | None:
    """The tokenizer.json of a model repository entry, if it has one."""
    newest = _newest(repository, model)
    if newest is None:
        return None
    named = str(_read_json(newest).get("model", ""))
    weights = _weights_directory(repository, newest.parent, named)
    file = weights / "tokenizer.json" if weights else None
    return file if file and file.is_file() else None


def _newest(repository: Path, model: str) -> Path | None:
    """The `model.json` of an entry's newest version."""
    found = [
        file for file in (repository / model).glob("*/model.json") if file.parent.name.isdigit()
    ]
    return max(found, key=lambda file: int(file.parent.name), default=None)


def read_format(repository: Path, model: str) -> PromptFormat | None:
    """Read tokenizer, chat template and length from a model repository entry."""
    newest = _newest(repository, model)
    if newest is None:
        return None
    engine = _read_json(newest)
    weights = _weights_directory(repository, newest.parent, str(engine.get("model", "")))
    if weights is None:
        return PromptFormat(None, None, {}, engine.get("max_model_len"))
    tokenizer_file = weights / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(tokenizer_file)) if tokenizer_file.exists() else None
    config = _read_json(weights / "tokenizer_config.json")
    special_tokens = _special_tokens(_read_json(weights / "special_tokens_map.json") | config)
    sources = _template_sources(weights, config)
    with_tools = sources.get("tool_use") or sources.get("default", "")
    declared = _read_json(repository / model / "chat.json").get("tool_call_format")
    return PromptFormat(
        tokenizer=tokenizer,
        template=_compile(sources.get("default")),
        special_tokens=special_tokens,
        max_model_len=engine.get("max_model_len")
        or model_length(_read_json(weights / "config.json")),
        leading_token=_leading_token(tokenizer, special_tokens),
        tool_template=_compile(sources.get("tool_use")),
        uses_tools="tools" in meta.find_undeclared_variables(_ENVIRONMENT.parse(with_tools)),
        tool_format=ToolFormat(declared) if declared else detect_format(with_tools),
        knows_developer="developer" in with_tools,
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
    for name in _SPECIAL_TOKENS:
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


def _leading_token(tokenizer: Tokenizer | None, special_tokens: dict[str, str]) -> str:
    """The token that the tokenizer puts before every text, if templates may write it as well."""
    token = special_tokens.get("bos_token", "")
    if tokenizer is None or not token:
        return ""
    return token if tokenizer.encode("").ids == [tokenizer.token_to_id(token)] else ""


def _template_sources(weights: Path, config: dict[str, Any]) -> dict[str, str]:
    """The model's templates by name: `default`, and `tool_use` where it has one."""
    file = weights / "chat_template.jinja"
    given = file.read_text() if file.is_file() else config.get("chat_template")
    if isinstance(given, list):  # several named templates
        sources = {item["name"]: item["template"] for item in given}
    else:
        sources = {"default": given} if given else {}
    for further in (weights / "additional_chat_templates").glob("*.jinja"):
        sources[further.stem] = further.read_text()
    return sources


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant said; it changes nothing.

    A call block, as in transformers: what is set inside is not seen outside.
    """

    tags = {"generation"}  # noqa: RUF012 # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("say"), [], [], body).set_lineno(line)

    def say(self, caller: Macro) -> str:
        """What the block says."""
        return str(caller())


def _compile(source: str | None) -> jinja2.Template | None:
    return _ENVIRONMENT.from_string(source) if source else None


def _make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, loopcontrols],
        autoescape=False,  # the text is a prompt, never a page
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; this one has transformers' arguments and defaults."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


_ENVIRONMENT = _make_environment()


def _invalid_messages(reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"The messages cannot be rendered: {reason}.", errors=[FieldError("messages", reason)]
    )
