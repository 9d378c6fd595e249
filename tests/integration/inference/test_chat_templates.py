"""Chat templates render as in transformers, character by character."""

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.core.errors import InvalidRequestError
from app.inference.prompts import PromptFormat, read_format
from tests.integration.support import write_model
from tests.judges import judge

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<c>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Shows the <b>weather</b> & more: é 漢 🙂",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": 'Be <brief> & "kind".'},
    {"role": "user", "content": "  How is it in Zürich? \n 漢字 🙂  "},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call00001",
                "type": "function",
                "function": {
                    "name": "weather",
                    "arguments": {"days": 2, "city": "Zürich", "x": [1.5, None, True, {"é": "'"}]},
                },
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": '{"sun": true}'},
    {"role": "assistant", "content": "Sunny."},
    {"role": "user", "content": "Thanks.\r\nAnd\ttomorrow? {{ 1 }} {% x %}"},
]

# Each uses something that templates in the wild use.
TEMPLATES = {
    "chatml": """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}""",
    "whitespace is controlled by the environment": """
  {% for message in messages %}
      {{ message.role }}:
        {% if message.content %}
      {{ message.content }}
        {% endif %}
  {% endfor %}
\t {# a comment #}
  {%+ if true %}kept{% endif +%}
{{ bos_token }}\x20\x20
end""",
    "break and continue": """{% for message in messages %}
{%- if message.role == 'tool' %}{% continue %}{% endif %}
{%- if loop.index0 >= 4 %}{% break %}{% endif -%}
[{{ loop.index }}/{{ loop.length }} {{ loop.first }} {{ loop.last }} {{ loop.revindex }} {{ loop.cycle('a', 'b') }}]
{%- else %}none{% endfor %}""",
    "macros, defaults and callers": """{% macro show(role, text='nothing') -%}
<{{ role }}>{{ text }}{{ varargs | length }}{{ kwargs | tojson }}
{%- endmacro %}
{% macro wrap(tag) %}<{{ tag }}>{{ caller('inside') }}</{{ tag }}>{% endmacro %}
{{ show('a') }}{{ show('b', 'c', 1, 2, z=3) }}
{% call(word) wrap('x') %}{{ word }} {{ messages | length }}{% endcall %}""",
    "namespaces and scopes": """{% set ns = namespace(found=false, count=0) %}{% set kept = 'outside' %}
{% for message in messages %}{% set kept = 'inside' %}
{%- if message.role == 'user' %}{% set ns.found = true %}{% set ns.count = ns.count + 1 %}{% endif %}
{%- endfor %}{{ ns.found }} {{ ns.count }} {{ kept }}
{% set block %}  a {{ messages[0].content }} {% endset %}[{{ block | trim }}]
{% with %}{% set inner = 1 %}{{ inner }}{% endwith %}{{ inner is defined }}""",
    "json in every form": """{{ messages[2] | tojson }}
{{ tools | tojson(indent=4) }}
{{ messages[2].tool_calls[0].function.arguments | tojson(separators=(',', ':')) }}
{{ messages[2] | tojson(sort_keys=true, indent=2) }}
{{ messages[0].content | tojson }}{{ messages[1].content | tojson(ensure_ascii=true) }}
{{ none | tojson }}{{ true | tojson }}{{ 1.0 | tojson }}{{ 'é' | tojson }}{{ [] | tojson(indent=2) }}""",
    "filters": """{{ messages | map(attribute='role') | join(', ') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ messages | rejectattr('role', 'in', ['user', 'tool']) | map(attribute='content') | list }}
{{ messages[0].content | upper | replace('E', 'e') | title | length }}
{{ messages[1].content | trim | default('x') | first }}{{ '' | default('x', true) }}
{{ [3, 1, 2] | sort | reverse | list }}{{ {'b': 1, 'a': 2} | dictsort }}{{ {'b': 1}.items() | list }}
{{ messages | groupby('role') | map('first') | list }}{{ 'a b' | wordcount }}{{ [1, 2] | sum }}
{{ 'text' | indent(4, true) }}{{ '%s-%d' | format('a', 3) }}{{ [1, [2]] | string }}{{ 3.7 | int }}
{{ messages | last | items | list }}{{ [1, 1, 2] | unique | list }}{{ range(5) | batch(2) | list }}
{{ '<&>' | e }}{{ '<&>' | safe }}{{ '<b>x</b>' | striptags }}{{ 'é' | urlencode }}""",
    "tests and operators": """{% for message in messages %}
{{ message.role is string }}{{ message.tool_calls is defined }}{{ message.name is undefined }}
{{- message.content is none }}{{ message is mapping }}{{ [] is iterable }}{{ 3 is odd }}{{ 4 is divisibleby 2 }}
{{- 'tool_calls' in message and message['tool_calls'] is iterable }}{{ message.content is not none }}
{%- endfor %}
{{ 7 // 2 }} {{ 7 % 2 }} {{ 2 ** 3 }} {{ 'a' ~ 1 ~ none }} {{ 1 if false }} {{ not true or 1 < 2 < 3 }}
{{ messages[::-1][0].role }}{{ messages[1:3] | length }}{{ messages[-1]['content'][:6] }}{{ (1, 2) }}{{ {'a': 1}.a }}""",
    "methods of strings": """{{ messages[1].content.strip().split(' ')[0].lower().startswith('how') }}
{{ messages[5].content.splitlines() }}{{ 'a,b'.split(',') }}{{ 'x'.join(['1', '2']) }}
{{ '{}:{}'.format('a', 1) }}{{ 'abc'.find('c') }}{{ 'a\\nb'.replace('\\n', ' ') }}{{ 'aXb'.partition('X') }}
{{ messages[0].get('nothing', 'default') }}{{ messages[0].keys() | list }}{{ 'é'.encode('utf-8') }}""",
    "generation blocks": """{% for message in messages %}
{% if message.role == 'assistant' %}{% generation %}{% set inner = message.content %}
{{ message.content }}{{ eos_token }}
{% endgeneration %}{{ inner is defined }}
{%- generation -%}  x  {%- endgeneration -%}
{% else %}{{ message.content }}{% endif %}
{% endfor %}""",
    "tools as hermes writes them": """{% if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- "# Tools\\n\\n<tools>" }}{% for tool in tools %}{{ "\\n" }}{{ tool | tojson }}{% endfor %}
{{- "\\n</tools>\\n<tool_call>\\n{\\"name\\": <function-name>}\\n</tool_call>" }}{% endif %}
{% for message in messages %}{% if message.tool_calls %}{% for tool_call in message.tool_calls %}
{%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>{% endfor %}{% elif message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}{% endif %}{% endfor %}""",
    "variables that are given or not": """{{ tools is defined }}{{ tools is none }}{{ documents is defined }}
{{ documents is none }}{{ add_generation_prompt }}{{ enable_thinking is defined and enable_thinking is false }}
{{ unk_token is defined }}{{ cls_token }}{{ bos_token }}{{ pad_token }}{{ nothing }}""",
    "what it refuses": """{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Roles must alternate, not ' + message.role) }}{% endif %}{% endfor %}""",
    "the day, by its form alone": "{{ strftime_now('%d %b %Y') | length }}{{ strftime_now('no directive') }}",
    "inner templates and imports are not there": "{% include 'x' %}",
    "dangerous members are not there": "{{ messages.__class__ }}{{ ''.join.__self__ }}",
    "lists do not change": "{{ messages.append(1) }}",
    "unicode": "{{ 'é漢🙂\\U0001F600\\x41' }}{{ messages[1].content | length }}{{ '🙂' in messages[1].content }}",
    "raw": "{% raw %}{{ not a variable }}{% endraw %}{{ '{{' }}",
    "filter sections and recursion": """{% filter upper %}{{ messages[0].content }}{% endfilter %}
{% for key, value in messages[2].items() recursive %}{{ key }}{% if value is mapping %}({{ loop(value.items()) }}){% endif %}{% endfor %}
{%- set a, b = 1, 2 %}{{ a }}{{ b }}{{ joiner('|')() }}{{ dict(a=1) }}{{ cycler('x', 'y').next() }}{{ lipsum is defined }}""",
}  # fmt: skip

ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"tools": TOOLS, "add_generation_prompt": False, "enable_thinking": False},
    {"documents": [{"title": "t", "text": "<&>"}], "bos_token": "mine"},
]
NAMED: list[dict[str, Any]] = [{}, {"tools": TOOLS}, {"tools": []}]
CONTINUED = [*MESSAGES[:2], {"role": "assistant", "content": "It is very "}]


def cases() -> list[dict[str, Any]]:
    common = {"special_tokens": SPECIAL_TOKENS}
    made = [
        {"templates": source, "messages": MESSAGES, "arguments": arguments, **common}
        for source in TEMPLATES.values()
        for arguments in ARGUMENTS
    ]
    both = {"default": "plain{{ tools }}", "tool_use": "with {{ tools | length }}"}
    made += [
        {"templates": both, "messages": MESSAGES, "arguments": arguments, **common}
        for arguments in NAMED
    ]
    continuing = {"add_generation_prompt": False, "continue_final_message": True}
    trims = TEMPLATES["chatml"].replace("message['content']", "message['content'] | trim")
    for source in (TEMPLATES["chatml"], trims, "{{ messages[0].content }}"):
        for messages in (CONTINUED, MESSAGES, MESSAGES[:3]):
            made.append(
                {"templates": source, "messages": messages, "arguments": continuing, **common}
            )
    refused = continuing | {"add_generation_prompt": True}
    made.append({"templates": trims, "messages": CONTINUED, "arguments": refused, **common})
    return made


def make_format(directory: Path, case: dict[str, Any]) -> PromptFormat:
    write_model(directory, "m", template=None)
    templates: Any = case["templates"]
    if isinstance(templates, dict):
        templates = [{"name": name, "template": text} for name, text in templates.items()]
    (directory / "m/1/tokenizer_config.json").write_bytes(
        orjson.dumps(case["special_tokens"] | {"chat_template": templates})
    )
    found = read_format(directory, "m")
    assert found is not None
    return found


async def render(prompt_format: PromptFormat, case: dict[str, Any]) -> str | None:
    try:
        return await prompt_format.render(case["messages"], case["arguments"])
    except InvalidRequestError:
        return None


@pytest.mark.soak
async def test_every_template_renders_as_in_transformers(tmp_path: Path) -> None:
    made = cases()
    answer = judge(Path(__file__).with_name("render_by_transformers.py"), json.dumps(made))
    expected: list[str | None] = json.loads(answer)
    for place, (case, text) in enumerate(zip(made, expected, strict=True)):
        ours = await render(make_format(tmp_path / str(place), case), case)
        assert ours == text, (case["templates"], case["arguments"])
    # Not because all of them failed: a few are meant to.
    assert sum(text is None for text in expected) < len(expected) / 3


@pytest.mark.parametrize("name", ["tools", "messages"])
async def test_a_template_shows_whether_it_takes_tools(tmp_path: Path, name: str) -> None:
    write_model(tmp_path, "m", template="{% if " + name + " %}x{% endif %}")
    found = read_format(tmp_path, "m")
    assert found is not None
    assert found.uses_tools is (name == "tools")
    assert found.tool_format is None
