"""Formats of models from their files: texts of tokens, variables of templates, messages left open."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

from app.core.errors import InvalidRequestError
from app.inference import chat_templates, prompts
from app.inference.chat_templates import compile_template, read_templates, render
from app.inference.model_registry import Model
from app.inference.prompts import PromptFormat, PromptFormats, read_format
from app.inference.tool_calls import ToolFormat

MESSAGES = [{"role": "user", "content": "a"}]
NAMES = ["<unk>", "<s>", "</s>", *"abcd "]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A token for each character, behind a begin token."""
    made = Tokenizer(WordLevel({name: place for place, name in enumerate(NAMES)}, "<unk>"))
    made.pre_tokenizer = Split("", "isolated")
    made.decoder = Fuse()
    made.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    made.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return made


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def format_of(tokenizer: Tokenizer | None, length: int | None = None) -> PromptFormat:
    return PromptFormat(tokenizer, None, {}, length, leading_token="<s>")


# --- tokens ---------------------------------------------------------------------------------------


async def test_tokens_are_the_text_that_encodes_to_them(tokenizer: Tokenizer) -> None:
    form = format_of(tokenizer)
    assert await form.text_of([1, 3, 4]) == "ab"  # the tokenizer adds the begin token itself
    assert await form.text_of([1, 1, 3]) == "<s>a"
    assert await form.text_of([1, 3, 2]) == "a</s>"
    assert await form.text_of([3, 4]) is None  # no text has no begin token
    assert await form.text_of([1, len(NAMES) - 1]) == " "
    assert await form.text_of([1, len(NAMES)]) is None
    assert await form.text_of([len(NAMES), 1]) is None
    assert await form.text_of([1, 2**40]) is None  # more than the tokenizer can read
    assert await format_of(None).text_of([1, 3]) is None


async def test_more_tokens_than_the_model_takes_are_no_text(tokenizer: Tokenizer) -> None:
    form = format_of(tokenizer, 3)
    assert await form.text_of([1, 3, 4]) == "ab"
    assert await form.text_of([1, 3, 4, 5]) is None


async def test_short_and_long_texts_are_counted_alike(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_MAX_INLINE_CHARACTERS", 4)
    form = format_of(tokenizer)
    assert [await form.count_tokens("a" * length) for length in range(7)] == [1, 2, 3, 4, 5, 6, 7]
    bare = await form.encode("ab", add_special_tokens=False)
    assert bare is not None
    assert bare.ids.tolist() == [3, 4]
    assert await format_of(None).count_tokens("a") is None


async def test_tokens_left_are_those_after_the_prompt(tokenizer: Tokenizer) -> None:
    def model(form: PromptFormat | None) -> Model:
        return Model("m", 1, True, "", form)

    assert await model(format_of(tokenizer, 10)).tokens_left("ab") == 7
    for form in (None, format_of(tokenizer), format_of(None, 10)):
        assert await model(form).tokens_left("ab") is None
    assert model(format_of(None, 10)).max_model_len == 10
    assert model(None).max_model_len is None
    template = compile_template("x")
    assert model(PromptFormat(None, template, {}, None)).has_chat
    assert not model(format_of(tokenizer)).has_chat
    assert not model(None).has_chat


def test_the_leading_token_is_left_to_the_engine(tokenizer: Tokenizer) -> None:
    assert format_of(tokenizer).for_engine("<s>a<s>") == "a<s>"
    assert format_of(tokenizer).for_engine("a") == "a"


# --- templates ------------------------------------------------------------------------------------


async def test_a_template_has_its_variables(tmp_path: Path) -> None:
    template = compile_template(
        "{{ bos_token }}{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}"
        "{{ extra is defined }}"
    )
    form = PromptFormat(None, template, {"bos_token": "<s>"}, None)
    assert await form.render(MESSAGES) == "<s>TrueTrueTrueFalse"
    given = {"add_generation_prompt": False, "documents": [], "extra": 1, "bos_token": "!"}
    assert await form.render(MESSAGES, given) == "!TrueFalseFalseTrue"


async def test_requests_with_tools_have_a_template_of_their_own() -> None:
    plain, with_tools = compile_template("plain"), compile_template("tools")
    form = PromptFormat(None, plain, {}, None, tool_template=with_tools)
    assert await form.render(MESSAGES) == "plain"
    assert await form.render(MESSAGES, {"tools": None}) == "plain"
    assert await form.render(MESSAGES, {"tools": []}) == "tools"
    assert await PromptFormat(None, plain, {}, None).render(MESSAGES, {"tools": []}) == "plain"


def open_final(template: str, content: Any, **variables: Any) -> str:
    compiled = compile_template(template)
    assert compiled is not None
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    given = {"continue_final_message": True, "add_generation_prompt": False} | variables
    text = render(compiled, messages, given)
    assert messages[-1]["content"] == content
    return text


def test_the_final_message_is_left_open() -> None:
    every = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert open_final(every, "a") == "[q][a"
    assert open_final(every, "a ") == "[q][a "
    trimming = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    assert open_final(trimming, "a ") == "[q][a"
    assert open_final("{{ messages[-1].content }}", "a") == "a"
    assert open_final("{{ messages[-1].content }}", "") == ""
    assert open_final(every, "a", continue_final_message=False) == "[q][a]"


def test_a_final_message_that_cannot_be_left_open_is_refused() -> None:
    every = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    with pytest.raises(ValueError, match="set add_generation_prompt to false"):
        open_final(every, "a", add_generation_prompt=True)
    for content in (None, [{"type": "text", "text": "a"}]):
        with pytest.raises(TypeError, match="no content to continue"):
            open_final(every, content)
    for template in ("[]", "{{ messages[-1].content | upper }}", "{{ messages[0].content }}"):
        with pytest.raises(ValueError, match="changes the final message"):
            open_final(template, "a")
    with pytest.raises(ValueError, match="changes the final message"):
        open_final("{{ messages[-1].content | replace('word', 'x') }}", "a word")


def test_the_output_of_a_template_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_templates, "_MAX_CHARACTERS", 10)
    template = compile_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert template is not None
    pieces = [{"content": "12345"}, {"content": "67890"}]
    assert render(template, pieces, {}) == "1234567890"
    with pytest.raises(ValueError, match="more than 10 characters"):
        render(template, [*pieces, {"content": "x"}], {})


def test_templates_have_files_or_are_named(tmp_path: Path) -> None:
    assert read_templates(tmp_path, {}) == {}
    assert read_templates(tmp_path, {"chat_template": ""}) == {}
    assert read_templates(tmp_path, {"chat_template": "x"}) == {"default": "x"}
    named = [{"name": "default", "template": "x"}, {"name": "rag", "template": "y"}]
    assert read_templates(tmp_path, {"chat_template": named}) == {"default": "x", "rag": "y"}
    write(tmp_path / "chat_template.jinja", "file")
    write(tmp_path / "additional_chat_templates" / "tool_use.jinja", "tools")
    found = {"default": "file", "tool_use": "tools"}
    assert read_templates(tmp_path, {"chat_template": "x"}) == found


# --- files ----------------------------------------------------------------------------------------


def test_a_format_is_read_from_the_files_of_a_model(tmp_path: Path, tokenizer: Tokenizer) -> None:
    weights = tmp_path / "m" / "1" / "weights"
    write(tmp_path / "m" / "1" / "model.json", {"model": "models/m/1/weights"})
    write(weights / "config.json", {"max_position_embeddings": 64, "eos_token_id": 9})
    write(weights / "tokenizer.json", tokenizer.to_str())
    write(weights / "special_tokens_map.json", {"bos_token": "map", "unk_token": "<unk>"})
    write(weights / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    write(weights / "chat_template.jinja", "{{ messages }}<tool_call>")
    found = read_format(tmp_path, "m")
    assert found is not None
    assert found.tokenizer is not None
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert (found.max_model_len, found.leading_token) == (64, "<s>")
    assert (found.special_ids, found.end_ids) == (frozenset({1, 2}), frozenset({2, 9}))
    assert (found.uses_tools, found.tool_template, found.knows_developer) == (False, None, False)
    assert found.tool_format is ToolFormat.HERMES
    write(tmp_path / "m" / "1" / "model.json", {"model": "models/m/1/weights", "max_model_len": 8})
    write(tmp_path / "m" / "chat.json", {"tool_call_format": "mistral"})
    write(weights / "additional_chat_templates" / "tool_use.jinja", "{{ tools }} developer")
    (weights / "tokenizer.json").unlink()
    found = read_format(tmp_path, "m")
    assert found is not None
    assert (found.max_model_len, found.tokenizer, found.leading_token) == (8, None, "")
    assert (found.special_ids, found.end_ids) == (frozenset(), frozenset({9}))
    assert found.tool_format is ToolFormat.MISTRAL
    assert found.tool_template is not None
    assert found.uses_tools
    assert found.knows_developer


async def test_a_format_is_read_once(tmp_path: Path) -> None:
    formats = PromptFormats(tmp_path)
    assert await formats.get("m") is None
    write(tmp_path / "m" / "1" / "model.json", {"model": "elsewhere", "max_model_len": 8})
    assert await formats.get("m") is None
    first, again = await asyncio.gather(PromptFormats(tmp_path).get("m"), formats.get("n"))
    assert first is not None
    assert first == PromptFormat(None, None, {}, 8, revision=first.revision)
    assert again is None


async def test_a_template_without_messages_is_refused_by_its_words() -> None:
    form = PromptFormat(None, compile_template("{{ raise_exception('no user') }}"), {}, None)
    with pytest.raises(InvalidRequestError, match="refused them: no user"):
        await form.render(MESSAGES)
