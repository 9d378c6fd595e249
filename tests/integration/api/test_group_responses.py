"""Requests of several results: keys that name all of them, erased ones, clients that come back."""

import asyncio
from typing import Any

import asyncpg
import httpx
import pytest

from app.core.listener import ENDED
from app.core.settings import Settings
from tests.conftest import Service, run_service
from tests.integration.support import assert_openai_error, assert_problem, until

BODY: dict[str, Any] = {"model": "scripted", "prompt": "{{chunks=2}}", "max_tokens": 4}
KEY = {"Idempotency-Key": "k"}


async def complete(
    service: Service, headers: dict[str, str] = KEY, **members: object
) -> httpx.Response:
    return await service.client.post("/v1/completions", json=BODY | members, headers=headers)


async def stored(connection: asyncpg.Connection) -> int:
    count: int = await connection.fetchval("SELECT count(*) FROM results")
    return count


async def test_a_key_names_all_results_of_its_request(
    service: Service, connection: asyncpg.Connection
) -> None:
    first = await complete(service, n=3)
    again = await complete(service, n=3)
    assert (first.status_code, again.status_code) == (200, 200)
    assert first.json() == again.json()
    assert first.headers["x-result-id"] == again.headers["x-result-id"]
    assert await stored(connection) == 3


async def test_another_number_of_choices_is_another_request(
    service: Service, connection: asyncpg.Connection
) -> None:
    assert (await complete(service, n=2)).status_code == 200
    for members in ({"n": 5}, {}, {"n": 2, "store": False}, {"n": 2, "prompt": ["a", "b"]}):
        assert_openai_error(await complete(service, **members), 409)
    # Nothing of what was refused is stored, or runs.
    assert await stored(connection) == 2


async def test_groups_under_one_key_at_one_moment(
    service: Service, connection: asyncpg.Connection
) -> None:
    answers = await asyncio.gather(*(complete(service, n=n) for n in (2, 5, 3, 2, 4, 1)))
    winners = [answer for answer in answers if answer.status_code == 200]
    assert {answer.status_code for answer in answers} == {200, 409}
    assert len({answer.headers["x-result-id"] for answer in winners}) == 1
    assert await stored(connection) == len(winners[0].json()["choices"])
    assert await connection.fetchval("SELECT count(*) FROM contexts") == 1


async def test_a_group_that_is_no_longer_whole_is_told_so(
    service: Service, connection: asyncpg.Connection
) -> None:
    first = await complete(service, n=2)
    second_id = first.headers["x-result-id"].split(", ")[1]
    assert (await service.client.delete(f"/results/{second_id}")).status_code == 204
    assert_openai_error(await complete(service, n=2), 409)
    first_id = first.headers["x-result-id"].split(", ")[0]
    assert (await service.client.delete(f"/results/{first_id}")).status_code == 204
    assert (await complete(service, n=2)).status_code == 200  # the key went with its result


async def test_what_was_erased_meanwhile_is_no_empty_answer(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    """Two APIs get the same request; one responds, which erases it, before the other reads."""
    async with (
        run_service(settings, with_worker=True) as one,
        run_service(settings, with_worker=False) as other,
    ):
        # The other API is late: it gets no notification of the end before the text is erased.
        handlers = other.services.listener._handlers
        on_ended, handlers[ENDED] = handlers[ENDED], [lambda _: None]
        late = asyncio.create_task(complete(other, store=False))
        await until(lambda: stored(connection))  # it is new to this API, which waits for its end
        answer = await complete(one, store=False)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"]
        await until(lambda: connection.fetchval("SELECT erased_at FROM results"))
        assert not late.done()
        handlers[ENDED] = on_ended
        for handler in on_ended:
            handler("")  # as after a reconnection
        assert_openai_error(await late, 410, "erased")


async def test_a_retry_goes_no_further_ahead_than_its_token_may(
    service: Service, connection: asyncpg.Connection
) -> None:
    sent = await service.client.post(
        "/results/", json={"model": "scripted", "content": "x {{chunks=1}}"},
        headers={"Prefer": "wait=30"},
    )  # fmt: skip
    await connection.execute("UPDATE results SET priority = 100")
    again = await service.client.post(f"/results/{sent.json()['id']}/retry")
    assert again.status_code == 202
    assert await connection.fetchval("SELECT priority FROM results WHERE retry_of IS NOT NULL") == 0


async def test_control_characters_in_a_path_name_nothing(service: Service) -> None:
    for path in ("/models/scripted/unload%0A", "/results/%0A", "/v1/models%0D", "/%00"):
        answer = await service.client.post(path)
        assert answer.status_code == 404, path
    assert_problem(await service.client.get("/models/%0A"), 404, "not_found")
    listed = await service.client.get("/models/scripted")
    assert listed.json()["ready"]


FAILING = "{{chunks=3 fail_at=1}}"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", BODY | {"prompt": FAILING}),
        ("/generate", {"model": "scripted", "inputs": FAILING}),
        ("/inference/scripted", {"text": "{{chunks=3 fail_at=0}}"}),
    ],
)  # fmt: skip
async def test_a_failure_that_is_told_again_says_so(
    service: Service, path: str, body: dict[str, Any]
) -> None:
    first = await service.client.post(path, json=body, headers=KEY)
    again = await service.client.post(path, json=body, headers=KEY)
    assert first.status_code >= 400
    assert again.status_code == first.status_code
    assert again.headers["Idempotent-Replayed"] == "true"
    assert "another key" in again.text
    assert "another key" not in first.text
    assert "Idempotent-Replayed" not in first.headers
    other = await service.client.post(path, json=body, headers={"Idempotency-Key": "other"})
    assert "another key" not in other.text


async def test_a_stream_of_what_failed_before_says_so(service: Service) -> None:
    """And OpenAI's client does not send it again and again."""
    first = await complete(service, prompt=FAILING)
    assert "X-Should-Retry" not in first.headers
    assert (await complete(service, prompt=FAILING)).headers["X-Should-Retry"] == "false"
    body = BODY | {"prompt": FAILING, "stream": True}
    streamed = await service.client.post("/v1/completions", json=body, headers=KEY)
    assert streamed.headers["Idempotent-Replayed"] == "true"
    assert "another key" in streamed.text


async def test_a_stream_that_is_not_stored_is_erased_at_its_end(service: Service) -> None:
    body = BODY | {"stream": True, "store": False}
    streamed = await service.client.post("/v1/completions", json=body)
    assert streamed.text.endswith("data: [DONE]\n\n")
    result = await service.client.get(f"/results/{streamed.headers['X-Result-Id']}")
    assert result.json()["erased_at"]


async def test_the_failure_of_one_streamed_choice_cancels_the_others(service: Service) -> None:
    prompts = [FAILING, "{{chunks=400 delay_ms=100}}"]
    body = BODY | {"prompt": prompts, "stream": True, "max_tokens": 400}
    streamed = await service.client.post("/v1/completions", json=body)
    assert '"error"' in streamed.text
    _, slow = streamed.headers["X-Result-Id"].split(", ")
    result = await service.client.get(f"/results/{slow}", params={"wait": 30})
    assert result.json()["error"]["code"] == "cancelled"


async def test_what_is_told_again_is_marked(service: Service) -> None:
    response = {"model": "scripted", "input": "{{chunks=1}}"}
    for path, body in (
        ("/v1/completions", BODY),
        ("/v1/responses", response),
        ("/v1/responses", response | {"background": True}),
        ("/v1/responses", response | {"stream": True}),
    ):
        headers = {"Idempotency-Key": f"{path}{len(body)}{'stream' in body}"}
        first = await service.client.post(path, json=body, headers=headers)
        again = await service.client.post(path, json=body, headers=headers)
        assert (first.status_code, again.status_code) == (200, 200), again.text
        assert "Idempotent-Replayed" not in first.headers
        assert again.headers["Idempotent-Replayed"] == "true"


@pytest.mark.trial
async def test_a_stopping_process_does_not_mark_its_refusal_as_replayed(
    settings: Settings, service: Service, connection: asyncpg.Connection
) -> None:
    """A client that takes a replayed error for the result's end would never read the result."""
    slow: dict[str, Any] = {"prompt": "{{chunks=40 delay_ms=100}}", "max_tokens": 40}
    async with run_service(settings, with_worker=False) as stopping:
        first = asyncio.create_task(complete(service, **slow))
        await until(lambda: stored(connection))
        stopping.app.state.stop()
        refused = await complete(stopping, **slow)
        assert_openai_error(refused, 503, "stopping")
        assert "Idempotent-Replayed" not in refused.headers
        assert "X-Should-Retry" not in refused.headers
        again = await complete(service, **slow)
    assert again.status_code == 200
    assert again.json() == (await first).json()
    assert again.headers["X-Result-Id"] == refused.headers["X-Result-Id"]
