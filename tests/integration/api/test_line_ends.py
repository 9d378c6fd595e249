"""Line ends of Unicode in texts: streams and files of lines have them as escapes, in every dialect."""

import json
from typing import Any

import httpx
import pytest

from tests.conftest import Service
from tests.integration.support import finish, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "one\x85two\u2028three\u2029four"
PROMPT = f"{{{{text={TEXT}}}}}"
CHAT: dict[str, Any] = {
    "model": "scripted",
    "max_tokens": 8,
    "messages": [{"role": "user", "content": PROMPT}],
}
STREAMS: dict[str, dict[str, Any]] = {
    "/results/": {"model": "scripted", "content": PROMPT},
    "/v1/chat/completions": CHAT | {"stream": True},
    "/v1/completions": {"model": "scripted", "prompt": PROMPT, "stream": True},
    "/v1/responses": {"model": "scripted", "input": PROMPT, "stream": True},
    "/v1/messages": CHAT | {"stream": True},
    "/generate_stream": {"inputs": PROMPT, "parameters": {"max_new_tokens": 8}},
}


def assert_whole(answer: httpx.Response) -> None:
    """A reader that ends lines as Python does reads the same as one that ends them at line feeds."""
    assert answer.status_code == 200, answer.text
    assert "two\\u2028three" in answer.text
    lines = answer.content.decode().splitlines()
    assert lines == answer.text.removesuffix("\n").split("\n")
    for line in lines:
        if line.startswith("data:") and not line.endswith("[DONE]"):
            json.loads(line.removeprefix("data:"))


@pytest.mark.parametrize("path", STREAMS)
async def test_frames_have_one_line_for_each_reader(chat_service: Service, path: str) -> None:
    headers = {"accept": "text/event-stream"}
    answer = await chat_service.client.post(path, json=STREAMS[path], headers=headers)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert_whole(answer)


async def test_raw_text_is_as_it_is(chat_service: Service) -> None:
    body = {"text": PROMPT, "max_tokens": "8"}
    answer = await chat_service.client.post("/inference/scripted", json=body)
    assert answer.text.endswith(TEXT)


async def test_an_export_has_one_line_for_each_result(chat_service: Service) -> None:
    assert (await finish(chat_service, PROMPT, metadata={"k": TEXT}))["result"] == TEXT
    answer = await chat_service.client.get("/results/export", params={"limit": 1})
    assert_whole(answer)
    (line,) = answer.content.decode().splitlines()
    found = json.loads(line)
    assert (found["content"], found["metadata"]) == (PROMPT, {"k": TEXT})


async def _ended(chat_service: Service, path: str, member: str, ends: set[str]) -> dict[str, Any]:
    async def has_ended() -> dict[str, Any] | None:
        found: dict[str, Any] = (await chat_service.client.get(path)).json()
        return found if found[member] in ends else None

    found: dict[str, Any] = await until(has_ended)
    return found


async def test_a_file_of_a_batch_has_one_line_for_each_request(chat_service: Service) -> None:
    client = chat_service.client
    line = {
        "custom_id": TEXT,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": CHAT,
    }
    wrong = line | {"custom_id": f"{TEXT}2", "body": CHAT | {"model": TEXT}}
    content = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in (line, wrong))
    sent = await client.post(
        "/v1/files", files={"file": ("in.jsonl", content.encode())}, data={"purpose": "batch"}
    )
    created = await client.post(
        "/v1/batches",
        json={
            "input_file_id": sent.json()["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        },
    )
    path = f"/v1/batches/{created.json()['id']}"
    batch = await _ended(chat_service, path, "status", {"completed", "failed"})
    for kind, custom_id in (("output", TEXT), ("error", f"{TEXT}2")):
        answer = await client.get(f"/v1/files/{batch[f'{kind}_file_id']}/content")
        assert_whole(answer)
        (one,) = answer.content.decode().splitlines()
        assert json.loads(one)["custom_id"] == custom_id


async def test_results_of_a_batch_of_messages_have_one_line_each(chat_service: Service) -> None:
    created = await chat_service.client.post(
        "/v1/messages/batches", json={"requests": [{"custom_id": "a", "params": CHAT}]}
    )
    path = f"/v1/messages/batches/{created.json()['id']}"
    await _ended(chat_service, path, "processing_status", {"ended"})
    answer = await chat_service.client.get(f"{path}/results")
    assert_whole(answer)
    message = json.loads(answer.text)["result"]["message"]
    assert message["content"][0]["text"] == TEXT
