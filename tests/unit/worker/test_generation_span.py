"""Attributes of a call of a model, by what is requested and how it ends."""

import array
import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from app.core import tracing
from app.inference.triton_errors import NotTakenError, StreamLostError
from app.queue.claim import Claim
from app.queue.continuation import Resume
from tests.unit.worker.scripted_servers import Bench, OnDelta, delta
from tests.unit.worker.test_attempt import claim_of
from tests.virtual_time import run_in_virtual_time


class Calls:
    """Keeps the spans of calls: their names and attributes."""

    def __init__(self) -> None:
        self.found: list[tuple[str, dict[str, Any]]] = []

    @contextlib.contextmanager
    def calling(
        self,
        name: str,
        _parent: str,
        attributes: tracing.Attributes,
        answer: Callable[[], tracing.Attributes],
    ) -> Iterator[str]:
        try:
            yield "00-1-3-01"
        finally:
            self.found.append((name, {**attributes, **answer()}))

    def only(self) -> dict[str, Any]:
        ((_, attributes),) = self.found
        return attributes


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    monkeypatch.setattr(tracing, "active", cast(tracing.Tracing, calls))
    return calls


def claim(parameters: dict[str, Any] | None = None, **members: Any) -> Claim:
    return replace(
        claim_of(resumable=True), trace="00-1-2-01", parameters=parameters or {}, **members
    )


OF_EACH = {
    "gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "server.address",
    "server.port", "llm.result_id", "llm.attempt", "llm.team_id",
}  # fmt: skip


async def test_the_parameters_of_a_request_have_the_conventions_types(calls: Calls) -> None:
    parameters = {
        "max_tokens": 5, "temperature": 0, "top_p": 1, "top_k": 3, "frequency_penalty": 1,
        "presence_penalty": -1, "seed": 2, "stop": ["secret"], "min_p": 0.1, "lora_name": "tuned",
        "structured_outputs": {"json_object": True},
    }  # fmt: skip
    await Bench(1).generation(claim(parameters, is_chat=True)).run()
    ((name, found),) = calls.found
    assert name == "chat m:tuned"
    assert found["gen_ai.response.model"] == found["gen_ai.request.model"] == "m:tuned"
    assert (found["server.address"], found["server.port"]) == ("a", 1)
    requested = {key: value for key, value in found.items() if "request." in key}
    assert [
        repr(requested[f"gen_ai.request.{key}"]) for key in ("temperature", "top_k", "seed")
    ] == [
        "0.0",
        "3.0",
        "2",
    ]
    assert requested.keys() == {
        f"gen_ai.request.{name}"
        for name in (
            *("model", "stream", "max_tokens", "temperature", "top_p", "top_k", "seed"),
            *("frequency_penalty", "presence_penalty"),
        )
    }
    assert found["gen_ai.output.type"] == "json"
    assert "secret" not in str(found)


@pytest.mark.parametrize(
    ("constraint", "kind"),
    [({"json": {}}, "json"), ({"regex": "a"}, "text"), ({"choice": ["a"]}, "text")],
)
async def test_the_type_of_output_is_that_of_the_constraint(
    calls: Calls, constraint: dict[str, Any], kind: str
) -> None:
    await Bench(1).generation(claim({"structured_outputs": constraint})).run()
    assert calls.only()["gen_ai.output.type"] == kind


@pytest.mark.parametrize(
    ("task", "operation", "dimensions"), [("embed", "embeddings", 3), ("score", "score", None)]
)
async def test_a_pooling_model_generates_nothing(
    calls: Calls, task: str, operation: str, dimensions: int | None
) -> None:
    bench = Bench(1)

    async def answer(on_delta: OnDelta) -> None:
        vector = array.array("f", [1, 2, 3]).tobytes()
        on_delta(delta("", prompt_tokens=4, completion_tokens=0, vector=vector))

    bench.clients[0].answer = answer
    await bench.generation(claim({"task": task}, is_chat=True)).run()
    ((name, found),) = calls.found
    assert name == f"{operation} m"
    assert found.get("gen_ai.embeddings.dimension.count") == dimensions
    assert found["gen_ai.usage.input_tokens"] == 4
    others = {"gen_ai.response.model", "gen_ai.usage.input_tokens"}
    assert found.keys() - {"gen_ai.embeddings.dimension.count"} == OF_EACH | others


async def test_a_vector_that_is_missing_is_an_error(calls: Calls) -> None:
    await Bench(1).generation(claim({"task": "embed"})).run()
    assert calls.only()["error.type"] == "ModelFailedError"


async def test_a_stream_that_ends_early_is_an_error(calls: Calls) -> None:
    bench = Bench(1)

    async def answer(on_delta: OnDelta) -> None:
        on_delta(delta("half", None))

    bench.clients[0].answer = answer
    await bench.generation(claim()).run()
    found = calls.only()
    assert found["error.type"] == "StreamLostError"
    assert found["gen_ai.usage.output_tokens"] == 1
    assert "gen_ai.response.finish_reasons" not in found


async def test_a_stream_without_any_response_is_an_error(calls: Calls) -> None:
    bench = Bench(1)

    async def answer(_: OnDelta) -> None:
        """Nothing."""

    bench.clients[0].answer = answer
    await bench.generation(claim()).run()
    assert calls.only()["error.type"] == "StreamLostError"


def test_each_server_that_is_tried_has_a_span(calls: Calls) -> None:
    async def work() -> None:
        bench = Bench(1, 1)

        async def refuse(_: OnDelta) -> None:
            await asyncio.sleep(3)
            raise NotTakenError("away")

        async def answer(on_delta: OnDelta) -> None:
            await asyncio.sleep(2)
            on_delta(delta("x", prompt_tokens=7))

        bench.clients[0].answer, bench.clients[1].answer = refuse, answer
        await bench.generation(claim()).run()

    run_in_virtual_time(work())
    (_, refused), (_, answered) = calls.found
    assert refused.keys() == OF_EACH | {"gen_ai.request.stream", "error.type"}
    assert (refused["server.address"], answered["server.address"]) == ("a", "b")
    assert answered["gen_ai.response.time_to_first_chunk"] == pytest.approx(2.0)


@pytest.mark.parametrize("is_answered", [True, False])
async def test_an_attempt_that_continues_has_its_own_tokens(
    calls: Calls, is_answered: bool
) -> None:
    """The tokens of a result's spans add up to what its engines did."""
    bench = Bench(1, continues_by_text=True)

    async def answer(on_delta: OnDelta) -> None:
        if not is_answered:
            raise StreamLostError("gone")
        on_delta(delta("c", completion_tokens=2))

    bench.clients[0].answer = answer
    resume = Resume(text="ab", token_ids=b"\1\0\0\0" * 2, completion_tokens=2, prompt_tokens=5)
    attempt = bench.generation(
        replace(
            claim_of(resumable=True, resume=resume), trace="00-1-2-01", parameters={"max_tokens": 9}
        )
    )
    await attempt.run()
    found = calls.only()
    assert found.get("gen_ai.usage.output_tokens") == (2 if is_answered else None)
    assert found.get("gen_ai.usage.input_tokens") == (5 if is_answered else None)
