"""`Prefer: wait` is a preference: a committed result is returned even if the wait fails."""

from app.core.settings import Settings
from tests.conftest import run_service
from tests.integration.support import assert_problem, read


async def test_the_id_is_told_when_too_many_wait_already(settings: Settings) -> None:
    full = settings.model_copy(update={"max_waiters": 0})
    async with run_service(full, with_worker=False) as api:
        answer = await api.client.post(
            "/results/",
            json={"model": "scripted", "content": "a"},
            headers={"Prefer": "wait=5"},
        )
        assert answer.status_code == 202, answer.text
        assert "preference-applied" not in answer.headers
        result_id = answer.json()["id"]
        assert answer.headers["location"] == f"/results/{result_id}"
        assert (await read(api, result_id))["state"] == "pending"
        waiting = await api.client.get(f"/results/{result_id}", params={"wait": 5})
        assert_problem(waiting, 503, "too_many_waiters")
