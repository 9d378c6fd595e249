"""The main job: save a prompt, send it, keep the result."""

import asyncio

from tests.conftest import Service

PROMPT = "Describe leases. {{chunks=5}}"


async def test_send_and_keep(service: Service) -> None:
    client = service.client
    created = await client.post("/contexts/", json={"content": PROMPT, "metadata": {"a": 1}})
    assert created.status_code == 201
    context = created.json()
    assert created.headers["location"] == f"/contexts/{context['id']}"
    assert context["content"] == PROMPT
    assert context["metadata"] == {"a": 1}

    sent = await client.post(f"/models/send/scripted/{context['id']}")
    assert sent.status_code == 202
    accepted = sent.json()
    assert accepted["state"] == "pending"
    assert accepted["model_ready"] is True
    assert sent.headers["location"] == f"/results/{accepted['id']}"

    answer = await client.get(f"/results/{accepted['id']}", params={"wait": 20})
    result = answer.json()
    assert result["state"] == "completed", result
    assert len(result["result"].split()) == 5
    assert PROMPT not in result["result"]
    assert result["finish_reason"] == "stop"
    assert result["usage"]["completion_tokens"] == 5
    assert result["model_version"] == 1
    assert result["attempt"] == 1
    assert result["error"] is None
    assert accepted.keys() == result.keys()
    times = [result[name] for name in ("created_at", "started_at", "first_token_at", "finished_at")]
    assert times == sorted(times)


async def test_one_call_waits(service: Service) -> None:
    answer = await service.client.post(
        "/results/",
        json={"model": "scripted", "content": "hi", "parameters": {"max_tokens": 3}},
        headers={"Prefer": "wait=20"},
    )
    assert answer.status_code == 200
    assert answer.json()["state"] == "completed"
    assert answer.json()["finish_reason"] == "length"
    assert answer.headers["preference-applied"] == "wait=20"


async def test_bulk_is_one_commit_with_errors_in_place(service: Service) -> None:
    items = [
        {"model": "scripted", "content": "one {{chunks=1}}"},
        {"model": "nobody", "content": "two"},
        {"model": "scripted", "content": "three {{chunks=1}}", "parameters": {"temperature": -1}},
        {"model": "scripted", "context_id": "01890000-0000-7000-8000-000000000000"},
        {"model": "scripted", "content": "five {{chunks=1}}"},
    ]
    answer = await service.client.post("/results/", json=items)
    assert answer.status_code == 202
    one, two, three, four, five = answer.json()
    assert (two["code"], three["code"], four["code"]) == (
        "unknown_model",
        "invalid_request",
        "not_found",
    )
    done = await asyncio.gather(
        *(service.client.get(f"/results/{item['id']}", params={"wait": 20}) for item in (one, five))
    )
    assert [item.json()["state"] for item in done] == ["completed", "completed"]
