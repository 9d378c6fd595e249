"""Texts that are checked against the schema of their request, and those that are not."""

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from app.core.errors import FailureCode
from app.inference.model_registry import Model, ModelRegistry
from app.inference.prompts import PromptFormat
from app.inference.reasoning import ReasoningFormat
from app.queue.finish import AttemptOutcome
from app.results.streams.output_buffer import OutputBuffer
from app.worker.output_check import check_output
from tests.unit.worker.scripted_servers import Bench, OnDelta, Registry, delta
from tests.unit.worker.test_attempt import claim_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORCED: dict[str, Any] = {"structured_outputs": {"json": SCHEMA}}
GOOD, WRONG, CUT = '{"a": 1}', '{"a": "x"}', '{"a": 1'


def code_of(
    text: str, parameters: dict[str, Any] = FORCED, reason: str = "stop", **members: Any
) -> str | None:
    """The code of the failure. `members` are of the model's format; without any it is not known."""

    class Known(Registry):
        def all(self) -> list[Model]:
            form = PromptFormat(None, None, {}, None, **members) if members else None
            return [Model("m", 1, True, "", form)]

    written = OutputBuffer()
    written.append(text)
    claim = replace(claim_of(), parameters=parameters)
    registry = cast(ModelRegistry, Known())
    failure = asyncio.run(check_output(claim, reason, written, registry))
    assert failure is None or not failure.retryable
    return None if failure is None else failure.code


@pytest.mark.parametrize(
    ("text", "parameters", "reason", "fails"),
    [
        (GOOD, FORCED, "stop", False),
        (WRONG, FORCED, "stop", True),
        (CUT, FORCED, "stop", True),
        (CUT, FORCED, "length", False),
        (WRONG, {}, "stop", False),
        (WRONG, {"structured_outputs": None}, "stop", False),
        (WRONG, {"structured_outputs": {"regex": "x"}}, "stop", False),
        (CUT, FORCED | {"stop": ["}"]}, "stop", False),
        (CUT, FORCED | {"stop_token_ids": [1]}, "stop", False),
        (CUT, FORCED | {"stop": []}, "stop", True),
        (WRONG, FORCED | {"stop": ["}"]}, "stop", True),
        ("{}", {"structured_outputs": {"json_object": True}}, "stop", False),
        ("[]", {"structured_outputs": {"json_object": True}}, "stop", True),
        ("7", {"structured_outputs": {"json": True}}, "stop", False),
        (f"[{'1,' * 5000}1]", {"structured_outputs": {"json": {"type": "null"}}}, "stop", True),
    ],
)
def test_the_end_and_the_parameters_decide_what_is_checked(
    text: str, parameters: dict[str, Any], reason: str, fails: bool
) -> None:
    expected = FailureCode.INVALID_OUTPUT if fails else None
    assert code_of(text, parameters, reason) == expected


@pytest.mark.parametrize("opening", ["<think>", ""])
def test_reasoning_is_not_part_of_the_text(opening: str) -> None:
    thought = f"{opening}it is 1</think>\n"
    behind: dict[str, Any] = {"reasoning": ReasoningFormat.THINK, "constrains_reasoning": False}
    assert code_of(thought + GOOD, **behind) is None
    assert code_of(thought + WRONG, **behind) == FailureCode.INVALID_OUTPUT
    assert code_of(thought, **behind) == FailureCode.INVALID_OUTPUT
    # The files of a model of another host are not there.
    assert code_of(thought + GOOD) is None
    assert code_of(thought + WRONG) == FailureCode.INVALID_OUTPUT
    # The engine forces the text from its first token, and no dialect splits it.
    at_once = behind | {"constrains_reasoning": True}
    assert code_of(thought + GOOD, **at_once) == FailureCode.INVALID_OUTPUT
    assert code_of(thought + GOOD, constrains_reasoning=False) == FailureCode.INVALID_OUTPUT


def test_an_engine_that_ignores_the_schema_fails_the_result_and_is_healthy() -> None:
    async def work() -> None:
        bench = Bench(1)

        async def answer(on_delta: OnDelta) -> None:
            on_delta(delta(WRONG, "stop"))

        bench.clients[0].answer = answer
        attempt = bench.generation(replace(claim_of(), parameters=FORCED))
        end = await attempt.run()
        assert end is not None
        assert end.failure is not None
        assert (end.outcome, end.failure.code) == (AttemptOutcome.FAILED, "invalid_output")
        assert "it does not follow `type` at `/a`" in end.failure.message
        assert (end.output, end.keeps_text) == (WRONG, False)

    asyncio.run(work())
