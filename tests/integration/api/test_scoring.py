"""Log probabilities of prompts, by the native API and OpenAI's, with the scripted model."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from app.cli.up.triton import EmbeddedTriton
from app.core.settings import Settings
from app.results.drafts import GroupRequest, Prompt
from app.results.replays import Replays
from app.results.requests import SendOptions
from tests.conftest import Service, make_settings, run_service, run_triton
from tests.integration.support import assert_openai_error, finish, read, until, write_model
from tests.nvidia_like import nvidia_like
from tests.postgres import PostgresServer

PROMPT = "one two {{chunks=2}}"
WORDS = ["one", " two", " {{chunks=2}}"]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %} end"
SCORED: dict[str, Any] = {"model": "scripted", "prompt": PROMPT, "echo": True, "logprobs": 1}


@pytest.fixture
async def scoring(
    postgres_server: PostgresServer, database_name: str, triton: EmbeddedTriton, tmp_path: Path
) -> AsyncIterator[Service]:
    """API and worker; the scripted model has a tokenizer and a chat template."""
    write_model(tmp_path, "scripted", template=TEMPLATE)
    settings = make_settings(postgres_server, database_name, triton, model_repository=tmp_path)
    async with run_service(settings, with_worker=True) as service:
        yield service


def texts(positions: list[Any]) -> list[str]:
    """The tokens' own texts; the first token has no entry."""
    assert positions[0] is None
    return [next(iter(one.values()))["decoded_token"] for one in positions[1:]]


async def complete(service: Service, **members: Any) -> dict[str, Any]:
    answer = await service.client.post("/v1/completions", json=SCORED | members)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def test_native_results_keep_them_in_the_engines_order(service: Service) -> None:
    result = await finish(service, PROMPT, parameters={"prompt_logprobs": 2})
    assert texts(result["prompt_logprobs"]) == WORDS[1:]
    assert "logprobs" not in result
    again = await read(service, result["id"])
    assert again["prompt_logprobs"] == result["prompt_logprobs"]
    assert "prompt_logprobs" not in await finish(service, PROMPT)
    (short,) = (await service.client.get("/results/", params={"limit": 1})).json()
    assert "prompt_logprobs" not in short
    full = (await service.client.get("/results/", params={"full": True})).json()
    assert [one.get("prompt_logprobs") for one in full] == [None, result["prompt_logprobs"]]
    lines = (await service.client.get("/results/export")).text.splitlines()
    assert result["prompt_logprobs"] in [json.loads(one).get("prompt_logprobs") for one in lines]


async def test_a_retry_and_a_saved_context_have_them(service: Service) -> None:
    context = (await service.client.post("/contexts/", json={"content": PROMPT})).json()
    sent = await service.client.post(
        f"/models/send/scripted/{context['id']}", json={"parameters": {"prompt_logprobs": 0}}
    )
    first = await read(service, sent.json()["id"], wait=30)
    assert texts(first["prompt_logprobs"]) == WORDS[1:]
    retried = await service.client.post(f"/results/{first['id']}/retry")
    second = await read(service, retried.json()["id"], wait=30)
    assert second["prompt_logprobs"] == first["prompt_logprobs"]


async def test_they_are_erased_with_the_texts(
    scoring: Service, connection: asyncpg.Connection
) -> None:
    answer = await complete(scoring, store=False)
    assert answer["choices"][0]["prompt_logprobs"]
    await until(lambda: connection.fetchval("SELECT erased_at FROM results"))
    assert await connection.fetchval("SELECT prompt_logprobs FROM results") is None


async def test_echo_with_logprobs_is_the_prompt_then_the_output(scoring: Service) -> None:
    (choice,) = (await complete(scoring))["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][1:3] == WORDS[1:]
    assert len(logprobs["tokens"]) == len(WORDS) + 2
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert choice["text"] == PROMPT + "".join(logprobs["tokens"][3:])
    positions = choice["prompt_logprobs"]
    own = [next(iter(one.values()))["logprob"] for one in positions[1:]]
    assert logprobs["token_logprobs"][1:3] == own
    for top, position in zip(logprobs["top_logprobs"][1:], positions[1:], strict=False):
        assert top == {one["decoded_token"]: one["logprob"] for one in position.values()}
    # The tokenizer of the test knows no word: the first token has the text of an unknown one.
    offsets = [0]
    for token in logprobs["tokens"][:-1]:
        offsets.append(offsets[-1] + len(token))
    assert logprobs["text_offset"] == offsets
    (plain,) = (await complete(scoring, echo=False))["choices"]
    assert "prompt_logprobs" not in plain
    assert plain["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][3:]


async def test_max_tokens_0_returns_the_prompt_alone(scoring: Service) -> None:
    answer = await complete(scoring, max_tokens=0)
    (choice,) = answer["choices"]
    assert choice["text"] == PROMPT
    assert len(choice["logprobs"]["tokens"]) == len(WORDS)
    assert answer["usage"]["completion_tokens"] == 1  # as vLLM counts it
    plain = {"model": "scripted", "prompt": PROMPT, "echo": True, "max_tokens": 0}
    bare = (await scoring.client.post("/v1/completions", json=plain)).json()["choices"][0]
    assert (bare["text"], bare["logprobs"]) == (PROMPT, None)


async def test_each_prompt_and_choice_has_its_own(scoring: Service) -> None:
    prompts = [PROMPT, "three four five {{chunks=1}}"]
    choices = (await complete(scoring, prompt=prompts, n=2, max_tokens=0))["choices"]
    assert [choice["text"] for choice in choices] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [3, 3, 4, 4]


async def test_chats_and_completions_take_prompt_logprobs(scoring: Service) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    body = {"model": "scripted", "messages": messages, "prompt_logprobs": 1}
    answer = (await scoring.client.post("/v1/chat/completions", json=body)).json()
    assert texts(answer["prompt_logprobs"]) == [*WORDS[1:], " end"]
    plain = (await scoring.client.post("/v1/chat/completions", json=body | {"prompt_logprobs": None})).json()  # fmt: skip
    assert "prompt_logprobs" not in plain
    (choice,) = (await complete(scoring, echo=False, logprobs=None, prompt_logprobs=1))["choices"]
    assert texts(choice["prompt_logprobs"]) == WORDS[1:]
    assert choice["logprobs"] is None


async def test_a_result_of_an_older_worker_is_no_score(
    scoring: Service, connection: asyncpg.Connection
) -> None:
    """An older worker knows the parameter of the engine, and drops what the engine returns."""
    headers = {"Idempotency-Key": "k"}
    first = await scoring.client.post("/v1/completions", json=SCORED, headers=headers)
    assert first.status_code == 200
    await connection.execute("UPDATE results SET prompt_logprobs = NULL")
    again = await scoring.client.post("/v1/completions", json=SCORED, headers=headers)
    error = assert_openai_error(again, 503)
    assert "log probabilities of its prompt" in error["message"]


async def test_token_ids_that_no_text_has_need_a_backend_that_takes_them(
    scoring: Service, tmp_path: Path
) -> None:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a b": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "scripted" / "1" / "tokenizer.json"))
    settings = scoring.services.settings
    async with run_service(settings, with_worker=True) as service:
        body = {"model": "scripted", "prompt": [1], "max_tokens": 1}
        answer = await service.client.post("/v1/completions", json=body)
        error = assert_openai_error(answer, 400)
        assert "prompt_token_ids" in error["message"]
        for ids in ([2], [0, 7]):
            refused = await service.client.post("/v1/completions", json=body | {"prompt": ids})
            assert_openai_error(refused, 400, param="prompt")
        known = await service.client.post("/v1/completions", json=body | {"prompt": [0]})
        assert known.status_code == 200, known.text


@pytest.fixture(scope="module")
def nvidia(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTriton]:
    entries = nvidia_like(tmp_path_factory.mktemp("models"))
    with run_triton(EmbeddedTriton, tmp_path_factory.mktemp("nvidia"), entries) as server:
        yield server


async def test_nvidias_backend_is_refused_by_name(
    postgres_server: PostgresServer, database_name: str, nvidia: EmbeddedTriton
) -> None:
    settings: Settings = make_settings(postgres_server, database_name, nvidia)
    async with run_service(settings, with_worker=True) as service:
        scored = SCORED | {"model": "nvidia"}
        answer = await service.client.post("/v1/completions", json=scored)
        error = assert_openai_error(answer, 400)
        assert "prompt_logprobs" in error["message"]
        body = {"model": "nvidia", "content": "x", "parameters": {"prompt_logprobs": 0}}
        sent = (await service.client.post("/results/", json=body)).json()
        result = await read(service, sent["id"], wait=30)
        assert result["error"]["code"] == "invalid_request"
        assert "prompt_logprobs" in result["error"]["message"]
        usual = await service.client.post("/results/", json=body | {"parameters": {}})
        assert (await read(service, usual.json()["id"], wait=30))["state"] == "completed"


async def test_a_key_names_token_ids_and_not_their_text(api: Service) -> None:
    services = api.services
    replays = Replays(services.keys, services.jobs, services.results)
    options = SendOptions(idempotency_key="k")
    keys = [
        replays.group_key(GroupRequest("scripted", [Prompt("text", token_ids=ids)], options))
        for ids in (None, [1, 2], [3], [3])
    ]
    assert all(keys)
    assert len({key.request_hash for key in keys if key}) == 3
    assert keys[2] == keys[3]
