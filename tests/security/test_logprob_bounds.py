"""Log probabilities are bounded by request, and held as encoded JSON."""

import tracemalloc
from collections.abc import Mapping
from typing import Any

import orjson
import pytest

from app.core.errors import InvalidRequestError
from app.queue.result_size import count_logprobs
from app.results.drafts import check_logprobs
from app.results.streams.output_buffer import TokenLog
from tests.conftest import Service
from tests.integration.support import assert_refusal

MESSAGES = [{"role": "user", "content": "hi"}]
LONG = 5_000  # tokens: with 20 likely ones beside each, 105,000 log probabilities

# Each dialect's way to ask for more than a request may have.
REQUESTS: tuple[tuple[str, int, Mapping[str, Any]], ...] = (
    ("/results/", 422, {"content": "x", "parameters": {"max_tokens": LONG, "logprobs": 20}}),
    (
        "/results/",
        422,
        {"content": "x " * LONG, "parameters": {"max_tokens": 1, "prompt_logprobs": 20}},
    ),
    (
        "/v1/completions",
        400,
        {"prompt": ["x " * 900] * 50, "echo": True, "max_tokens": 0, "logprobs": 5},
    ),
    ("/v1/completions", 400, {"prompt": ["x"] * 50, "max_tokens": 1_000, "logprobs": 5}),
    ("/v1/responses", 400, {"input": "x", "max_output_tokens": LONG, "top_logprobs": 20}),
    (
        "/v1/chat/completions",
        400,
        {"messages": MESSAGES, "n": 128, "max_tokens": 1_000, "logprobs": True},
    ),
    (
        "/generate",
        422,
        {"inputs": "x", "parameters": {"max_new_tokens": 900_000, "details": True}},
    ),
)


async def test_a_request_has_a_bound_of_log_probabilities(api: Service) -> None:
    for path, status, body in REQUESTS:
        answer = await api.client.post(path, json={"model": "scripted", **body})
        assert_refusal(path, answer, status)
        assert "LLM_MAX_LOGPROBS" in answer.text


def test_ordinary_requests_are_below_the_bound() -> None:
    check_logprobs(count_logprobs({"max_tokens": 4_096, "logprobs": 20}), 100_000)
    check_logprobs(count_logprobs({"max_tokens": 1_000_000}), 100_000)
    with pytest.raises(InvalidRequestError, match="105,000"):
        check_logprobs(count_logprobs({"max_tokens": LONG, "logprobs": 20}), 100_000)


@pytest.mark.parametrize("word", [" the", "\U0001f600"], ids=["letters", "emoji"])
def test_a_worker_holds_the_bytes_of_the_wire(word: str) -> None:
    position = {
        str(place): {"logprob": -0.125, "rank": place, "decoded_token": word}
        for place in range(1, 22)
    }
    wire = orjson.dumps([position]).decode()
    tracemalloc.start()
    log = TokenLog()
    for _ in range(500):
        log.append(wire)
    held, _ = tracemalloc.get_traced_memory()
    parts = log.parts()
    end, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1.2 * 500 * len(wire.encode())
    assert parts
    # The end of an attempt copies no text; the threads of other tests may allocate a little.
    assert end - held < held / 10
