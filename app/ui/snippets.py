"""The page's last request as lines to paste: curl, and Python with httpx."""

import json
import pprint
import shlex
from collections.abc import Mapping
from typing import Any


def of_request(api_url: str, body: Mapping[str, Any], *, needs_token: bool) -> dict[str, str]:
    return {
        "curl": _curl(api_url, body, needs_token=needs_token),
        "Python": _python(api_url, body, needs_token=needs_token),
    }


def _curl(api_url: str, body: Mapping[str, Any], *, needs_token: bool) -> str:
    lines = [f"curl -s {shlex.quote(api_url + '/results/')}"]
    if needs_token:
        lines.append('-H "Authorization: Bearer $TOKEN"')
    lines += [
        "-H 'Content-Type: application/json'",
        "-H 'Prefer: wait=30'",
        f"-d {shlex.quote(json.dumps(body, ensure_ascii=False))}",
    ]
    return " \\\n  ".join(lines)


def _python(api_url: str, body: Mapping[str, Any], *, needs_token: bool) -> str:
    headers = (
        '\n    headers={"Authorization": f"Bearer {os.environ[\'TOKEN\']}"},' if needs_token else ""
    )
    literal = pprint.pformat(body, indent=4, width=88, sort_dicts=False)
    return f"""{"import os" + chr(10) if needs_token else ""}import httpx

body = {literal}
with httpx.Client(
    base_url={api_url!r},{headers}
    timeout=70,
) as api:
    result = api.post("/results/", json=body).raise_for_status().json()
    while result["state"] == "pending":
        path = f"/results/{{result['id']}}"
        result = api.get(path, params={{"wait": 60}}).raise_for_status().json()
print(result["result"])
"""
