"""The state in which templates leave the model, and the reasoning format of a model's files."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from app.inference.chat_templates import compile_template
from app.inference.prompts import PromptFormat, read_format
from app.inference.reasoning import ReasoningFormat, ReasoningUse

THINK = ReasoningFormat.THINK
USER = [{"role": "user", "content": "What is <think>?"}]
TOOL = [*USER, {"role": "tool", "content": "x"}]
HYBRID = (
    "{{ messages[-1].content }}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif always %}<think>\n{% endif %}"
)
UNTIL_TOOL = "{{ messages[-1].content }}{% if messages[-1].role == 'user' %}<think>{% endif %}"


def format_of(template: str, reasoning: ReasoningFormat | None = THINK) -> PromptFormat:
    return PromptFormat(None, compile_template(template), {}, None, reasoning=reasoning)


@pytest.mark.parametrize(
    ("template", "messages", "arguments", "is_open"),
    [
        (HYBRID, USER, {}, False),
        (HYBRID, USER, {"always": True}, True),
        (HYBRID, USER, {"always": True, "enable_thinking": False}, False),
        (HYBRID, USER, {"always": True, "enable_thinking": True}, True),
        (HYBRID, USER, {"always": True, "documents": [{"a": 1}]}, True),
        (UNTIL_TOOL, USER, {}, True),
        (UNTIL_TOOL, TOOL, {"tools": []}, False),
        # Nothing is generated behind the last message but its own continuation.
        (HYBRID, USER, {"always": True, "add_generation_prompt": False}, True),
        (HYBRID, TOOL, {"always": True, "add_generation_prompt": False}, False),
        (
            HYBRID,
            [{"role": "assistant", "content": "<think>a</think>b"}],
            {"continue_final_message": True, "add_generation_prompt": False},
            False,
        ),
        # A template that refuses every probe leaves the model before its reasoning.
        ("{{ raise_exception('no') }}", USER, {}, False),
    ],
)
async def test_the_end_of_the_prompt_decides(
    template: str, messages: list[dict[str, Any]], arguments: dict[str, Any], is_open: bool
) -> None:
    use = await format_of(template).reasoning_use(messages, arguments, ends=("x",))
    assert use == ReasoningUse(THINK, is_open, ("x",))


async def test_a_format_without_reasoning_has_no_rules() -> None:
    assert await format_of(HYBRID, None).reasoning_use(USER) is None


async def test_a_template_that_refuses_tools_is_probed_without_them() -> None:
    refusing = UNTIL_TOOL + "{% if messages|length > 1 %}{{ raise_exception('no') }}{% endif %}"
    assert await format_of(refusing).reasoning_use(TOOL) == ReasoningUse(THINK, is_open=True)


async def test_each_variant_is_rendered_once_and_few_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rendered = []
    render = PromptFormat.render

    async def count(form: PromptFormat, messages: Any, arguments: Any) -> str:
        rendered.append(arguments)
        return await render(form, messages, arguments)

    monkeypatch.setattr(PromptFormat, "render", count)
    form = format_of(HYBRID)
    for number in [*range(65), *range(65)[::-1]]:
        await form.reasoning_use(USER, {"always": number})
    assert len(rendered) == 66  # the oldest of 65 was dropped


def write_model(repository: Path, template: str, engine: dict[str, Any], chat: Any) -> PromptFormat:
    version = repository / "m" / "1"
    version.mkdir(parents=True)
    (version / "config.json").write_text("{}")
    (version / "model.json").write_text(json.dumps(engine | {"model": str(version)}))
    (version / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0}, "[UNK]"))
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    tokenizer.add_special_tokens([AddedToken("[THINK]", special=True)])
    tokenizer.save(str(version / "tokenizer.json"))
    if chat is not None:
        (repository / "m" / "chat.json").write_text(json.dumps(chat))
    form = read_format(repository, "m")
    assert form is not None
    return form


@pytest.mark.parametrize(
    ("template", "chat", "reasoning", "has_special_tags"),
    [
        ("<think>", None, THINK, False),
        ("[THINK]", None, ReasoningFormat.MISTRAL, True),
        ("<think>", {"reasoning_format": "auto"}, THINK, False),
        ("<think>", {"reasoning_format": "off"}, None, False),
        ("plain", {"reasoning_format": "mistral"}, ReasoningFormat.MISTRAL, True),
        ("plain", {"tool_call_format": "hermes"}, None, False),
    ],
)
def test_an_operator_may_declare_the_format(
    tmp_path: Path,
    template: str,
    chat: Any,
    reasoning: ReasoningFormat | None,
    has_special_tags: bool,
) -> None:
    form = write_model(tmp_path, template, {}, chat)
    assert (form.reasoning, form.has_special_tags) == (reasoning, has_special_tags)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'no' is not a valid ReasoningFormat"):
        write_model(tmp_path, "<think>", {}, {"reasoning_format": "no"})


@pytest.mark.parametrize(
    ("engine", "constrains"),
    [
        ({}, True),
        ({"reasoning_parser": "qwen3"}, False),
        ({"structured_outputs_config": {"reasoning_parser": "qwen3"}}, False),
        ({"structured_outputs_config": {"backend": "xgrammar"}}, True),
    ],
)
def test_the_engines_parser_is_known(
    tmp_path: Path, engine: dict[str, Any], constrains: bool
) -> None:
    assert write_model(tmp_path, "<think>", engine, None).constrains_reasoning is constrains
