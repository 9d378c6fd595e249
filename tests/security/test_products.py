"""Requests of a few megabytes whose results hold many: a query for each document, a prompt for each choice.

They are bounded and charged by sizes that are known before a text is rendered.
"""

import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest

from app.api.pooling.schemas import RerankRequest, ScoreRequest
from app.auth.principal import ANYONE
from app.core.byte_budget import ACCOUNT, Account, ByteBudget
from app.core.errors import InvalidRequestError
from app.core.ids import new_id
from app.inference.sampling import SamplingParameters
from app.results.choices import MAX_CHOICES_CHARACTERS
from app.results.drafts import GroupRequest, Prompt
from app.results.requests import SendOptions
from tests.unit.results.test_preparation import House

MIB = 2**20
LONG = "q" * 1_900_000  # just below LLM_MAX_BODY_BYTES
DOCUMENTS = [f"d{place}" for place in range(300)]


async def prepare(prompts: Sequence[Prompt], options: SendOptions, n: int = 1) -> Any:
    request = GroupRequest("m", prompts, options, n)
    ids = [new_id() for _ in range(request.size)]
    return await House().preparation.group(ANYONE, request, ids)


CHOSEN = SendOptions(
    parameters=SamplingParameters.model_validate(
        {"seed": 1, "structured_outputs": {"choice": ["c" * 4_000] * 400}}
    )
)


def ranked(request: RerankRequest | ScoreRequest) -> tuple[Sequence[Prompt], SendOptions, int]:
    return request.to_prompts(), request.to_send_options(), 1


PRODUCTS: dict[str, tuple[Sequence[Prompt], SendOptions, int]] = {
    "a query for each document": ranked(RerankRequest(query=LONG, documents=DOCUMENTS)),
    "a query for each text": ranked(RerankRequest(query=LONG, texts=DOCUMENTS)),
    "a text for each of many": ranked(ScoreRequest(text_1=LONG, text_2=DOCUMENTS)),
    "a prompt for each choice": (
        [Prompt(messages=[{"role": "user", "content": LONG}])],
        SendOptions(),
        128,
    ),
    "parameters for each choice": ([Prompt(content="x")], CHOSEN, 128),
    "parameters for each prompt": ([Prompt(content="x")] * 1_000, CHOSEN, 1),
    "tokens for each choice": (
        [Prompt(content="x", token_ids=[100_000] * 250_000)],
        SendOptions(parameters=SamplingParameters(seed=1)),
        128,
    ),
}


@pytest.mark.parametrize("product", PRODUCTS)
async def test_what_is_refused_takes_little_memory(product: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError, match=f"{MAX_CHOICES_CHARACTERS:,}"):
            await prepare(*PRODUCTS[product])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 96 * MIB  # of which JSON of a list of numbers takes 64 for a moment


@pytest.mark.parametrize("charged", [4 * 20_000 * 299, 0])
async def test_what_is_accepted_is_charged(charged: int) -> None:
    account = Account(ByteBudget(256 * MIB), "team")
    ACCOUNT.set(account)
    query = "q" * (20_000 if charged else 10)
    prepared = await prepare(*ranked(RerankRequest(query=query, documents=DOCUMENTS)))
    assert len(prepared) == 300
    assert account.held == charged
