"""Chat templates and token counts: what is rendered, what is refused, what is bounded."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from app.core.errors import InvalidRequestError
from app.inference import bounded_threads, prompts
from app.inference.prompts import PromptFormat, PromptFormats, read_format
from tests.integration.support import CHAT_TEMPLATE, write_model

MESSAGES = [{"role": "user", "content": "hi"}]


def make_format(directory: Path, template: str) -> PromptFormat:
    write_model(directory, "m", template=template)
    found = read_format(directory, "m")
    assert found is not None
    assert found.has_chat
    return found


async def render(directory: Path, template: str, messages: Any = MESSAGES) -> str:
    return await make_format(directory, template).render(messages)


async def refusal(directory: Path, template: str, messages: Any = MESSAGES) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        await render(directory, template, messages)
    (error,) = caught.value.errors
    assert error.field == "messages"
    return error.message


async def test_messages_become_a_prompt(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, *MESSAGES]
    assert await render(tmp_path, CHAT_TEMPLATE, messages) == "<system> s <user> hi <assistant>"


async def test_templates_have_what_hugging_faces_have(tmp_path: Path) -> None:
    template = (
        "{%- for message in messages %}{% if loop.index > 2 %}{% break %}{% endif %}\n"
        "{{ message | tojson }}{{ strftime_now('%Y')[:2] }}{{ message.content | trim }}\n"
        "{%- endfor %}{{ bos_token }}{{ add_generation_prompt }}"
    )
    directory = tmp_path / "m" / "1"
    write_model(tmp_path, "m", template=template)
    (directory / "tokenizer_config.json").write_bytes(
        orjson.dumps({"bos_token": {"content": "<s>"}, "eos_token": None})
    )
    found = read_format(tmp_path, "m")
    assert found is not None
    text = await found.render([{"role": "user", "content": " é "}] * 3)
    assert text.count('{"role": "user", "content": " é "}20é') == 2
    assert text.endswith("<s>True")


async def test_content_is_never_read_as_a_template(tmp_path: Path) -> None:
    content = "{{ messages }} {% for x in y %} {# #} {{ raise_exception('x') }} <b>&amp;"
    text = await render(tmp_path, "{{ messages[0].content }}", [{"role": "u", "content": content}])
    assert text == content


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['os'].system('true') }}",
        "{{ strftime_now.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'changed'}) }}",
        "{{ messages[0].pop('content') }}",
        "{{ '%s'.__mod__ }}{{ ''|attr('__class__')|attr('mro') }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
    ],
)
async def test_escapes_from_the_sandbox_are_refused_or_empty(tmp_path: Path, template: str) -> None:
    messages = [dict(MESSAGES[0])]
    try:
        text = await render(tmp_path, template, messages)
    except InvalidRequestError:
        text = ""
    assert not any(word in text for word in ("class", "module", "built-in", "<"))
    assert messages == MESSAGES


@pytest.mark.parametrize(
    "template",
    [
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ undefined.member }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ (messages[0].content * 2) ** 2 }}",
        "{{ raise_exception('only one') }}",
        "{{ range(10000000) }}",
        "{{ 10.0 ** 400 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 'a'.encode('utf-9') }}",
        "{{ messages[0]['role'].missing() }}",
        "{{ [][0].x }}",
        "{{ messages | map(attribute='content') | first | int('x') + 1 }}",
    ],
)
async def test_a_template_that_fails_refuses_the_messages(tmp_path: Path, template: str) -> None:
    assert await refusal(tmp_path, template)


async def test_the_templates_own_words_reach_the_client(tmp_path: Path) -> None:
    messages = [{"role": "robot", "content": ""}]
    assert "unknown role robot" in await refusal(tmp_path, CHAT_TEMPLATE, messages)


async def test_output_is_bounded(tmp_path: Path) -> None:
    template = "{% for i in range(100000) %}{{ messages[0].content }}{% endfor %}"
    messages = [{"role": "user", "content": "x" * 1000}]
    assert "characters" in await refusal(tmp_path, template, messages)


async def test_time_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_RENDER_TIMEOUT_SECONDS", 0.02)
    monkeypatch.setattr(bounded_threads, "_MAX_STRETCH", 1000)
    loops = "{% for i in range(3000) %}{% for j in range(5000) %}{% endfor %}{% endfor %}"
    assert "longer than" in await refusal(tmp_path, loops)


# --- counts and files -------------------------------------------------------------------------------


async def test_tokens_are_counted_short_and_long(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    found = read_format(tmp_path, "m")
    assert found is not None
    assert await found.count_tokens("one two three") == 3
    assert await found.count_tokens("word " * 10_000) == 10_000
    assert not found.has_chat


async def test_a_model_without_a_tokenizer_counts_nothing(tmp_path: Path) -> None:
    write_model(tmp_path, "m", tokenizer=False, max_model_len=9)
    found = read_format(tmp_path, "m")
    assert found is not None
    assert await found.count_tokens("one") is None
    assert found.max_model_len == 9


def test_the_length_is_the_engines_or_the_weights(tmp_path: Path) -> None:
    write_model(tmp_path, "engine", max_model_len=77)
    write_model(tmp_path, "weights")
    write_model(tmp_path, "nested")
    (tmp_path / "nested/1/config.json").write_text('{"text_config": {"n_positions": 55}}')
    write_model(tmp_path, "none")
    (tmp_path / "none/1/config.json").write_text("{}")
    lengths = []
    for name in ("engine", "weights", "nested", "none"):
        found = read_format(tmp_path, name)
        assert found is not None
        lengths.append(found.max_model_len)
    assert lengths == [77, 4096, 55, None]


def test_the_newest_version_is_read(tmp_path: Path) -> None:
    write_model(tmp_path, "m", max_model_len=1)
    for version, length in (("2", 2), ("10", 10)):
        directory = tmp_path / "m" / version
        directory.mkdir()
        engine = {"model": f"models/m/{version}", "max_model_len": length}
        (directory / "model.json").write_bytes(orjson.dumps(engine))
        (directory / "config.json").write_text("{}")
    found = read_format(tmp_path, "m")
    assert found is not None
    assert found.max_model_len == 10


def test_named_templates_and_missing_entries(tmp_path: Path) -> None:
    assert read_format(tmp_path, "nobody") is None
    write_model(tmp_path, "m")
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "m/1/tokenizer_config.json").write_bytes(orjson.dumps({"chat_template": templates}))
    found = read_format(tmp_path, "m")
    assert found is not None
    assert found.template is not None
    assert found.template.render() == "d"


def test_weights_that_are_not_here_make_a_model_text_only(tmp_path: Path) -> None:
    write_model(tmp_path, "m", max_model_len=5)
    (tmp_path / "m/1/model.json").write_text('{"model": "Qwen/Qwen3-0.6B", "max_model_len": 5}')
    (tmp_path / "m/1/config.json").unlink()
    found = read_format(tmp_path, "m")
    assert found is not None
    assert found == PromptFormat(None, None, {}, 5, revision=found.revision)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.json", "{"), ("model.json", "[]"), ("config.json", "[]"), ("config.json", "{"),
        ("tokenizer.json", "{}"), ("tokenizer_config.json", "nonsense"),
        ("chat_template.jinja", "{% for %}"), ("chat_template.jinja", "{{ x | nothing }}"),
        ("config.json", '{"n_positions": "many"}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config.json", '{"chat_template": [1]}'),
        ("tokenizer_config.json", '{"chat_template": 5}'),
    ],
)  # fmt: skip
async def test_broken_files_make_a_model_text_only(
    tmp_path: Path, file: str, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, "m")
    (tmp_path / "m/1" / file).write_text(content)
    formats = PromptFormats(tmp_path)
    assert await formats.get("m") is None
    assert "text-only" in caplog.text
    assert await formats.get("m") is None
