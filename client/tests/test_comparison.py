"""A comparison: one prompt to several models in one commit, all or none."""

import json
from typing import Any

import httpx
import pytest

from llm_api_client import AsyncClient, Client, Comparison, ConfigurationError, NotFoundError
from llm_api_client.schemas import Result, ResultError, Usage

EVIL = "<script>alert(1)</script> & 'x'"
MODELS = [
    {"name": "one", "ready": True}, {"name": "away", "ready": False}, {"name": "two", "ready": True},
]  # fmt: skip


class Service:
    """Stores what it is sent, except for the model `absent`; the first reads find results pending."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.paths: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(f"{request.method} {request.url.path}")
        if request.url.path == "/models/":
            return httpx.Response(200, json=MODELS)
        if request.url.path == "/results/":
            self.sent = json.loads(request.content)
            return httpx.Response(202, json=[self._outcome(i) for i in range(len(self.sent))])
        place = int(request.url.path.split("/")[2].removeprefix("r"))
        is_first = self.paths.count(self.paths[-1]) == 1
        ended = {"state": "completed", "result": f"text {place}"}
        return httpx.Response(200, json=self._outcome(place) | ({} if is_first else ended))

    def _outcome(self, place: int) -> dict[str, Any]:
        model = self.sent[place]["model"]
        if model == "absent":
            return {"status": 404, "code": "unknown_model", "detail": "d", "title": "t"}
        return {"id": f"r{place}", "state": "pending", "model_name": model}


def test_each_model_has_a_result() -> None:
    service = Service()
    with Client("http://x", transport=httpx.MockTransport(service)) as client:
        compared = client.compare("p", models=["a", "b", "a"], parameters={"seed": 1})
    assert [one.model_name for one in compared] == ["a", "b", "a"]
    assert [one.text for one in compared] == ["text 0", "text 1", "text 2"]
    assert len(compared) == 3
    assert service.paths.count("POST /results/") == 1
    keys = {one.pop("idempotency_key") for one in service.sent}
    assert len(keys) == 3
    same = {"content": "p", "parameters": {"seed": 1}}
    assert service.sent == [{"model": model} | same for model in "aba"]


async def test_models_that_are_ready_by_default() -> None:
    service = Service()
    messages = [{"role": "user", "content": "p"}]
    async with AsyncClient("http://x", transport=httpx.MockTransport(service)) as client:
        compared = await client.compare(messages, metadata={"a": 1}, deadline_seconds=60)
    assert [one.model_name for one in compared] == ["one", "two"]
    assert service.sent[0]["messages"] == messages
    assert (service.sent[1]["metadata"], service.sent[1]["deadline_seconds"]) == ({"a": 1}, 60)


def test_a_refused_model_cancels_the_others() -> None:
    service = Service()
    with Client("http://x", transport=httpx.MockTransport(service)) as client:
        with pytest.raises(NotFoundError, match="unknown_model"):
            client.compare("p", models=["a", "absent", "b"])
        assert service.paths[1:] == ["POST /results/r0/cancel", "POST /results/r2/cancel"]
        with pytest.raises(ConfigurationError, match="name the models"):
            client.compare("p", models=[])


def test_results_stand_side_by_side_in_notebooks() -> None:
    failed = ResultError(code="model_error", message=EVIL)
    shown = Comparison(
        results=[
            Result(
                id="1", state="completed", model_name=EVIL, result=f"a\n  {EVIL}",
                usage=Usage(completion_tokens=7),
            ),
            Result(id="2", state="failed", model_name="m", error=failed),
        ]
    )._repr_html_()  # fmt: skip
    assert "<script>" not in shown
    assert shown.count("<tr>") == 5  # no time is known
    assert shown.count("<td") == 10
    assert "a\n  &lt;script&gt;" in shown
    assert "model_error: &lt;script&gt;" in shown
    assert ">7<" in shown
