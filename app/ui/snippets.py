"""The page's last request as programs to paste: the Python client, curl, and the openai client."""

import json
import pprint
import shlex
from collections.abc import Mapping
from typing import Any

_KEY = "LLM_API_KEY"
# Arguments of the openai client's methods; it sends the others as they are in `extra_body`.
_OPENAI = frozenset(
    {
        "max_tokens", "temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty",
        "logit_bias",
    }
)  # fmt: skip


def of_request(api_url: str, body: Mapping[str, Any], *, needs_token: bool) -> dict[str, str]:
    return {
        "Python": _client(api_url, body, needs_token=needs_token),
        "curl": _curl(api_url, body, needs_token=needs_token),
        "Python with openai": _openai(api_url, body, needs_token=needs_token),
    }


def _client(api_url: str, body: Mapping[str, Any], *, needs_token: bool) -> str:
    note = f"  # the key is read from {_KEY}" if needs_token else ""
    return f"""from llm_api_client import Client

prompt = {_literal(body.get("messages") or body["content"])}
parameters = {_literal(body["parameters"])}
with Client({api_url!r}) as client:{note}
    result = client.send(prompt, model={body["model"]!r}, parameters=parameters)
    print(client.wait(result).checked().text)
"""


def _curl(api_url: str, body: Mapping[str, Any], *, needs_token: bool) -> str:
    lines = [f"curl -s {shlex.quote(api_url + '/results/')}"]
    if needs_token:
        lines.append(f'-H "Authorization: Bearer ${_KEY}"')
    lines += [
        "-H 'Content-Type: application/json'",
        "-H 'Prefer: wait=30'",
        f"-d {shlex.quote(json.dumps(body, ensure_ascii=False))}",
    ]
    return " \\\n  ".join(lines)


def _openai(api_url: str, body: Mapping[str, Any], *, needs_token: bool) -> str:
    parameters: dict[str, Any] = dict(body["parameters"])
    is_chat = bool(body.get("messages"))
    given = {name: parameters.pop(name) for name in sorted(_OPENAI & parameters.keys())}
    if (count := parameters.pop("logprobs", None)) is not None:
        given |= {"logprobs": True, "top_logprobs": count} if is_chat else {"logprobs": count}
    if parameters:
        given["extra_body"] = parameters
    more = "".join(f",\n    {name}={_literal(value)}" for name, value in given.items())
    key = f"os.environ[{_KEY!r}]" if needs_token else "'none'"
    method, member, text = (
        ("chat.completions", "messages", "message.content")
        if is_chat
        else ("completions", "prompt", "text")
    )
    return f"""{"import os" + chr(10) if needs_token else ""}from openai import OpenAI

client = OpenAI(base_url={api_url + "/v1"!r}, api_key={key})
response = client.{method}.create(
    model={body["model"]!r},
    {member}={_literal(body.get("messages") or body["content"])}{more},
)
print(response.choices[0].{text})
"""


def _literal(value: object) -> str:
    return pprint.pformat(value, indent=4, width=88, sort_dicts=False)
