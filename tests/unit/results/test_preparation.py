"""Results made of requests: their bounds, costs and choices, without models and databases."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast
from uuid import UUID

import orjson
import pytest

from app.auth.principal import ANYONE
from app.core.errors import (
    ConflictError,
    ErasedError,
    InvalidRequestError,
    ModelNotReadyError,
)
from app.core.ids import new_id
from app.core.settings import Settings
from app.inference.model_registry import Model
from app.inference.sampling import SamplingParameters
from app.queue.team_limits import Limits
from app.results.drafts import GroupRequest, Prompt
from app.results.preparation import Preparation
from app.results.requests import SendOptions
from app.results.retention.policy import Kept
from app.results.rows import SubmittedRequest
from tests.unit.results.test_drafts import Format

SETTINGS = Settings.model_construct(
    default_deadline_seconds=50.0, max_deadline_seconds=100.0, default_max_tokens=16,
    max_logprobs=100, continue_lost_attempts=True,
)  # fmt: skip
PROCESS = new_id()


class House:
    """The registry, limits, retention and rows that a preparation reads."""

    def __init__(self) -> None:
        self.model = Model("m", 3, True, "", None)
        self.limits = Limits()
        self.kept = Kept(600.0, None)
        self.request_row: SubmittedRequest | None = None
        self.preparation = Preparation(
            SETTINGS,
            registry=cast(Any, self),
            indexes=cast(Any, self),
            contexts=cast(Any, self),
            results=cast(Any, self),
            retention=cast(Any, self),
            admission=cast(Any, self),
            api_process=PROCESS,
            images=cast(Any, self),
        )

    async def find(self, _name: str, _team_id: str | None = None) -> Model:
        return self.model

    def serving(self, queue: str) -> Model:
        return replace(self.model, name=queue)

    async def limits_of(self, _team: str, _model: str) -> Limits:
        return self.limits

    async def of(self, _team: str) -> Kept:
        return self.kept

    async def fetched(self, _team: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return messages

    async def request(self, _team: str, _result: UUID) -> SubmittedRequest:
        assert self.request_row is not None
        return self.request_row

    async def group(self, count: int = 1, **members: Any) -> list[Any]:
        request = GroupRequest("m", [Prompt("text")], **members)
        prepared = await self.preparation.group(ANYONE, request, [new_id() for _ in range(count)])
        return [one.result for one in prepared]


def options(**members: Any) -> SendOptions:
    parameters = SamplingParameters(**members.pop("parameters", {}))
    return SendOptions(parameters=parameters, **members)


async def test_a_result_is_kept_no_longer_than_its_team_keeps_results() -> None:
    house = House()
    (result,) = await house.group(options=options(retain_seconds=600.0))
    assert result.retain_seconds == 600.0
    with pytest.raises(InvalidRequestError):
        await house.group(options=options(retain_seconds=601.0))
    house.kept = Kept(None, None)
    (result,) = await house.group(options=options(retain_seconds=601.0))
    assert result.retain_seconds == 601.0


@pytest.mark.parametrize(("seed", "seeds"), [(7, [7, 8, 9]), (None, [None] * 3), (0, [0, 1, 2])])
async def test_the_choices_of_a_prompt_have_seeds_of_their_own(
    seed: int | None, seeds: list[int | None]
) -> None:
    given = {} if seed is None else {"seed": seed}
    results = await House().group(3, n=3, options=options(parameters=given))
    parameters = [orjson.loads(one.parameters) for one in results]
    assert [one.get("seed") for one in parameters] == seeds
    assert {one["max_tokens"] for one in parameters} == {16}
    assert len({one.context_id for one in results}) == 1


async def test_the_results_of_a_request_are_a_group() -> None:
    house = House()
    first, second = await house.group(2, n=2, store=False, request="{}")
    assert first.group_id == second.group_id == first.id
    assert (first.on_disconnect, first.waiter_id) == ("cancel", PROCESS)
    assert (first.store, first.request) == (False, "{}")
    (alone,) = await house.group(on_disconnect="continue")
    assert (alone.group_id, alone.waiter_id, alone.store) == (None, None, True)
    request = GroupRequest("m", [Prompt("a"), Prompt("b")])
    prepared = await house.preparation.group(ANYONE, request, [new_id(), new_id()])
    assert len({one.result.context_id for one in prepared}) == 2
    assert prepared[1].result.group_id == prepared[0].result.id


async def test_a_model_that_is_not_ready_is_waited_for_on_demand() -> None:
    house = House()
    house.model = replace(house.model, ready=False)
    with pytest.raises(ModelNotReadyError):
        await house.group()
    assert len(await house.group(waits_for_model=True)) == 1


async def test_a_result_costs_its_prompt_where_tokens_are_limited() -> None:
    house = House()
    (result,) = await house.group()
    assert (result.tokens, result.limits) == (16, house.limits)
    house.limits = Limits(tokens_per_minute=100)
    (result,) = await house.group()
    assert (result.tokens, result.limits) == (17, house.limits)


async def test_the_log_probabilities_of_a_request_have_a_bound() -> None:
    """Those of all its results."""
    house = House()
    most = options(parameters={"logprobs": 4, "max_tokens": 10})
    assert len(await house.group(2, n=2, options=most)) == 2
    with pytest.raises(InvalidRequestError):
        await house.group(3, n=3, options=most)


@pytest.mark.parametrize(
    ("setting", "wanted", "parameters", "is_resumable"),
    [
        (True, None, {}, True),
        (True, True, {}, True),
        (True, False, {}, False),
        (False, True, {}, False),
        (True, None, {"seed": 1}, False),
    ],
)
async def test_a_text_may_be_continued_if_service_client_and_parameters_agree(
    setting: bool, wanted: bool | None, parameters: dict[str, Any], is_resumable: bool
) -> None:
    house = House()
    settings = SETTINGS.model_copy(update={"continue_lost_attempts": setting})
    house.preparation = replace(house.preparation, settings=settings)
    send = options(continue_lost_attempts=wanted, parameters=parameters)
    (result,) = await house.group(options=send)
    assert result.resumable is is_resumable


@pytest.mark.parametrize(
    ("defaults", "parameters", "is_resumable"),
    [
        (None, {}, True),
        ({}, {}, True),
        ({"temperature": 0.6, "repetition_penalty": 1.1}, {}, True),
        ({"presence_penalty": 1.5}, {}, False),
        ({"frequency_penalty": 0.5}, {"presence_penalty": 0.0}, False),
        ({"presence_penalty": 1.5}, {"presence_penalty": 0.0}, True),
        ({"temperature": 0.0}, {"seed": 1}, True),
    ],
)
async def test_a_model_has_penalties_of_its_own_that_are_not_continued(
    defaults: dict[str, float] | None, parameters: dict[str, Any], is_resumable: bool
) -> None:
    """Those of its generation_config.json hold where the request has none; some are unknown."""
    house = House()
    form = Format(1)
    form.default_parameters = defaults
    house.model = replace(house.model, format=cast(Any, form))
    (result,) = await house.group(options=options(parameters=parameters))
    assert result.resumable is is_resumable


async def test_options_are_those_of_the_result() -> None:
    send = options(deadline_seconds=9.0, metadata={"a": 1}, webhook_url="https://example.com/")
    (result,) = await House().group(options=send)
    assert (result.deadline_seconds, result.metadata) == (9.0, '{"a":1}')
    assert (result.webhook_url, result.model_version) == ("https://example.com/", 3)
    assert result.expected_bytes > 0
    (result,) = await House().group()
    assert (result.deadline_seconds, result.metadata, result.attribution) == (50.0, "{}", None)


async def test_messages_need_a_model_with_a_chat_template() -> None:
    house = House()
    for form in (None, Format(1)):
        house.model = replace(house.model, format=cast(Any, form))
        if form is not None:
            form.has_chat = False
        request = GroupRequest("m", [Prompt(messages=[{"role": "user", "content": "x"}])])
        with pytest.raises(InvalidRequestError, match="chat template"):
            await house.preparation.group(ANYONE, request, [new_id()])


# --- a result again ---------------------------------------------------------------------------------


def submitted(**members: Any) -> SubmittedRequest:
    known: dict[str, Any] = {
        "id": new_id(), "state": "failed", "context_id": new_id(), "model_name": "m",
        "prompt": "prompt", "parameters": '{"max_tokens": 8, "logprobs": 1}', "priority": 0,
        "metadata": "{}", "deadline_seconds": None, "webhook_url": None, "store": True,
        "erased_at": None, "kind": "generation", "source_id": None, "attribution": None,
        "output": None, "retain_seconds": None, "resumable": True,
    }  # fmt: skip
    return SubmittedRequest(**known | members)


async def test_a_retry_is_the_same_request_again() -> None:
    house, old, new = House(), new_id(), new_id()
    house.request_row = row = submitted(priority=5, deadline_seconds=9.0)
    prepared = await house.preparation.retry(replace(ANYONE, max_priority=3), old, new)
    result = prepared.result
    assert (result.id, result.retry_of, result.context_id) == (new, old, row.context_id)
    assert (result.priority, result.deadline_seconds, result.tokens) == (3, 9.0, 8)
    assert (result.prompt, result.resumable, prepared.logprobs) == ("prompt", True, 16)
    assert result.attribution is None
    house.limits = Limits(tokens_per_minute=100)
    house.request_row = submitted(resumable=False)
    result = (await house.preparation.retry(ANYONE, old, new)).result
    assert (result.tokens, result.deadline_seconds, result.resumable) == (10, 50.0, False)


async def test_a_result_that_is_pending_or_erased_is_not_sent_again() -> None:
    house = House()
    house.request_row = submitted(state="pending")
    with pytest.raises(ConflictError):
        await house.preparation.retry(ANYONE, new_id(), new_id())
    house.request_row = submitted(erased_at=datetime.now(UTC))
    with pytest.raises(ErasedError):
        await house.preparation.retry(ANYONE, new_id(), new_id())


async def test_an_attribution_costs_no_tokens() -> None:
    house = House()
    house.limits = Limits(tokens_per_minute=100)
    house.request_row = submitted(kind="attribution", parameters="{}", model_name="infini-gram/x")
    result = (await house.preparation.retry(ANYONE, new_id(), new_id())).result
    assert (result.tokens, result.model_name, result.kind) == (0, "infini-gram/x", "attribution")
