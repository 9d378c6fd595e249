"""Text Generation Inference's dialect, on the scripted model."""

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from app.core.settings import Settings
from tests.conftest import Service, run_service
from tests.integration.support import (
    CHAT_TEMPLATE,
    finish,
    read,
    send,
    serve,
    until,
    write_model,
)

HELLO = "hi {{chunks=4}}"
SLOW = "slow {{chunks=200 delay_ms=50}}"
SAMPLING = {"do_sample": True}


def body(inputs: str, **parameters: Any) -> dict[str, Any]:
    return {"inputs": inputs, "parameters": parameters}


async def post(service: Service, content: dict[str, Any], path: str = "/generate") -> Any:
    answer = await service.client.post(path, json=content)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def generate(service: Service, inputs: str, **parameters: Any) -> dict[str, Any]:
    answer: dict[str, Any] = await post(service, body(inputs, **parameters))
    return answer


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no"
    frames = answer.text.split("\n\n")
    assert frames.pop() == ""
    stripped = [frame.rsplit("\n", 1)[-1] for frame in frames]  # without comments
    assert all(frame.startswith("data:") for frame in stripped)
    return [orjson.loads(frame.removeprefix("data:")) for frame in stripped]


async def stream(service: Service, inputs: str, **parameters: Any) -> list[dict[str, Any]]:
    content = body(inputs, **parameters)
    return events_of(await service.client.post("/generate_stream", json=content))


def assert_error(answer: httpx.Response, status: int, kind: str) -> str:
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json"), (
        answer.text
    )
    error = answer.json()
    assert set(error) == {"error", "error_type"}
    assert error["error_type"] == kind, error
    text: str = error["error"]
    assert text
    return text


async def results_of(service: Service, answer: httpx.Response) -> list[dict[str, Any]]:
    ids = answer.headers["x-result-id"].split(", ")
    return [await read(service, one) for one in ids]


# --- texts ----------------------------------------------------------------------------------------


async def test_the_text_is_the_native_one_and_is_stored(service: Service) -> None:
    answer = await service.client.post("/generate", json=body(HELLO, max_new_tokens=9))
    (result,) = await results_of(service, answer)
    native = await finish(service, HELLO, parameters={"max_tokens": 9, "temperature": 0})
    assert (
        answer.json()
        == {"generated_text": native["result"]}
        == {"generated_text": result["result"]}
    )
    assert result["parameters"] == native["parameters"]
    context = await service.client.get(f"/contexts/{result['context_id']}")
    assert context.json()["content"] == HELLO


async def test_the_root_answers_with_a_list_or_with_events(service: Service) -> None:
    text = (await generate(service, HELLO))["generated_text"]
    assert await post(service, body(HELLO), "/") == [{"generated_text": text}]
    assert await post(service, body(HELLO) | {"stream": False}, "/") == [{"generated_text": text}]
    answer = await service.client.post("/", json=body(HELLO) | {"stream": True})
    assert events_of(answer)[-1]["generated_text"] == text


async def test_details_tell_each_token(service: Service) -> None:
    answer = await generate(service, HELLO, details=True)
    details = answer["details"]
    assert set(details) == {"finish_reason", "generated_tokens", "seed", "prefill", "tokens"}
    assert (details["finish_reason"], details["generated_tokens"]) == ("eos_token", 4)
    assert (details["seed"], details["prefill"]) == (None, [])
    assert len(details["tokens"]) == 4
    assert "".join(token["text"] for token in details["tokens"]) == answer["generated_text"]
    for token in details["tokens"]:
        assert set(token) == {"id", "text", "logprob", "special"}
        assert token["id"] >= 0
        assert token["logprob"] < 0
        assert token["special"] is False


async def test_the_chosen_token_is_told_among_the_likeliest(service: Service) -> None:
    """Also where it is not the likeliest: the database keeps no order of JSON members."""
    inputs = "hi {{chunks=20}}"
    parameters = {"details": True, "top_n_tokens": 3, "max_new_tokens": 20}
    answer = await generate(service, inputs, **parameters)
    details = answer["details"]
    assert "".join(token["text"] for token in details["tokens"]) == answer["generated_text"]
    places = set()
    for token, top in zip(details["tokens"], details["top_tokens"], strict=True):
        assert len(top) == 3
        assert [one["logprob"] for one in top] == sorted(
            (one["logprob"] for one in top), reverse=True
        )
        places.add(top.index(token))
    assert places == {0, 1}
    events = await stream(service, inputs, **parameters)
    assert [event["token"] for event in events] == details["tokens"]
    assert [event["top_tokens"] for event in events] == details["top_tokens"]


async def test_one_event_per_token(service: Service) -> None:
    answer = await service.client.post("/generate_stream", json=body(HELLO, details=True))
    events = events_of(answer)
    (result,) = await results_of(service, answer)
    assert [event["index"] for event in events] == [1, 2, 3, 4]
    assert all(set(event) == {"index", "token", "generated_text", "details"} for event in events)
    assert all((event["generated_text"], event["details"]) == (None, None) for event in events[:-1])
    last = events[-1]
    assert last["generated_text"] == result["result"]
    assert last["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": 4,
        "seed": None,
        "input_length": result["usage"]["prompt_tokens"],
    }
    whole = await generate(service, HELLO, details=True)
    assert [event["token"] for event in events] == whole["details"]["tokens"]


async def test_a_silent_stream_is_kept_alive(settings: Settings) -> None:
    impatient = settings.model_copy(update={"keep_alive_seconds": 0.05})
    async with run_service(impatient, with_worker=True) as running:
        content = body("x {{chunks=2 first_delay_ms=500}}")
        answer = await running.client.post("/generate_stream", json=content)
        assert answer.text.startswith(": keep-alive\n")
        assert len(events_of(answer)) == 2
        raw = await running.client.post("/inference", json={"text": content["inputs"]})
        assert raw.text == events_of(answer)[-1]["generated_text"]


async def test_a_stream_without_details_has_none(service: Service) -> None:
    *_, last = await stream(service, HELLO)
    assert last["details"] is None
    assert last["generated_text"]


async def test_the_prompt_comes_before_the_text_on_request(service: Service) -> None:
    text = (await generate(service, HELLO))["generated_text"]
    assert (await generate(service, HELLO, return_full_text=True))["generated_text"] == HELLO + text
    *_, last = await stream(service, HELLO, return_full_text=True)
    assert last["generated_text"] == HELLO + text


async def test_why_the_text_ended(service: Service) -> None:
    async def reason(inputs: str, **parameters: Any) -> tuple[str, str]:
        whole = await generate(service, inputs, details=True, **parameters)
        *_, last = await stream(service, inputs, details=True, **parameters)
        assert last["generated_text"] == whole["generated_text"]
        assert last["details"]["finish_reason"] == whole["details"]["finish_reason"]
        return whole["details"]["finish_reason"], whole["generated_text"]

    said = "{{text=one two three four}}"
    assert await reason(said) == ("eos_token", "one two three four")
    assert await reason(said, max_new_tokens=2) == ("length", "one two")
    assert await reason(said, stop=["five", "two"]) == ("stop_sequence", "one two")
    assert await reason(said, stop=["five"]) == ("eos_token", "one two three four")


# --- sampling -------------------------------------------------------------------------------------


async def test_a_seed_is_chosen_and_told(service: Service) -> None:
    first = await generate(service, HELLO, details=True, **SAMPLING)
    seed = first["details"]["seed"]
    assert seed is not None
    again = await generate(service, HELLO, details=True, seed=seed, **SAMPLING)
    assert again == first
    other = await generate(service, HELLO, details=True, **SAMPLING)
    assert other["details"]["seed"] != seed
    *_, last = await stream(service, HELLO, details=True, seed=2**64 - 2, **SAMPLING)
    assert last["details"]["seed"] == 2**64 - 2


@pytest.mark.parametrize(
    ("content", "temperature"),
    [
        ({"inputs": HELLO}, 1.0),  # TGI's trap: without `parameters` it samples
        (body(HELLO), 0.0),
        (body(HELLO, temperature=1.0), 0.0),
        (body(HELLO, temperature=0.5), 0.5),
        (body(HELLO, top_k=3), 1.0),
        (body(HELLO, top_p=0.5), 1.0),
        (body(HELLO, do_sample=True), 1.0),
    ],
)
async def test_when_it_samples(
    service: Service, content: dict[str, Any], temperature: float
) -> None:
    answer = await service.client.post("/generate", json=content)
    (result,) = await results_of(service, answer)
    assert result["parameters"]["temperature"] == temperature
    assert ("seed" in result["parameters"]) == (temperature > 0)


async def test_parameters_reach_the_engine(service: Service) -> None:
    given = {
        "repetition_penalty": 1.5, "frequency_penalty": -0.5, "top_k": 7, "top_p": 0.9,
        "temperature": 0.3, "seed": 5, "stop": ["x"], "max_new_tokens": 3, "watermark": False,
        "typical_p": None, "decoder_input_details": False, "unknown": 1,
    }  # fmt: skip
    answer = await service.client.post("/generate", json=body(HELLO, **given))
    (result,) = await results_of(service, answer)
    assert result["parameters"] == {
        "repetition_penalty": 1.5, "frequency_penalty": -0.5, "top_k": 7, "top_p": 0.9,
        "temperature": 0.3, "seed": 5, "stop": ["x"], "max_tokens": 3,
        "include_stop_str_in_output": True,
    }  # fmt: skip


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("grammar", "structure"),
    [
        ({"type": "json", "value": SCHEMA}, {"json": SCHEMA}),
        ({"type": "json", "value": orjson.dumps(SCHEMA).decode()}, {"json": SCHEMA}),
        ({"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}}, {"json": SCHEMA}),
        ({"type": "regex", "value": "a+"}, {"regex": "a+"}),
    ],
)
async def test_grammars(service: Service, grammar: Any, structure: Any) -> None:
    answer = await service.client.post("/generate", json=body(HELLO, grammar=grammar))
    (result,) = await results_of(service, answer)
    assert result["parameters"]["structured_outputs"] == structure


async def test_a_grammar_with_nul_inside_is_refused(service: Service) -> None:
    grammar = {"type": "json", "value": r'{"properties": {"a": {"const": "\u0000"}}}'}
    answer = await service.client.post("/generate", json=body(HELLO, grammar=grammar))
    assert_error(answer, 422, "validation")


async def test_the_best_of_several_is_the_likeliest_with_the_others_in_its_details(
    service: Service,
) -> None:
    content = body(HELLO, best_of=4, details=True, top_n_tokens=1, **SAMPLING)
    answer = await service.client.post("/generate", json=content)
    results = await results_of(service, answer)
    assert len(results) == 4
    totals = {
        result["result"]: sum(
            next((one["logprob"] for one in place.values() if one.get("sampled")), None)
            or next(iter(place.values()))["logprob"]
            for place in result["logprobs"]
        )
        for result in results
    }
    assert len(totals) == 4
    best = answer.json()
    others = best["details"]["best_of_sequences"]
    assert best["generated_text"] == max(totals, key=lambda text: totals[text])
    assert {best["generated_text"], *(other["generated_text"] for other in others)} == set(totals)
    seeds = {best["details"]["seed"], *(other["seed"] for other in others)}
    assert seeds == {result["parameters"]["seed"] for result in results}
    assert len(seeds) == 4
    for one in (best["details"], *others):
        assert one["finish_reason"] == "eos_token"
        assert len(one["tokens"]) == len(one["top_tokens"]) == one["generated_tokens"] == 4
    plain = await service.client.post("/generate", json=body(HELLO, best_of=2, **SAMPLING))
    assert set(plain.json()) == {"generated_text"}


async def test_a_key_makes_the_seed(service: Service) -> None:
    """Sent again under its key, a request that samples is the same request."""
    headers = {"Idempotency-Key": "k"}
    for path, content in (("/generate", body(HELLO, **SAMPLING)), ("/", {"inputs": HELLO})):
        headers = {"Idempotency-Key": f"key of {path}"}
        first, again = [
            await service.client.post(path, json=content, headers=headers) for _ in range(2)
        ]
        assert first.status_code == again.status_code == 200, again.text
        assert first.headers["x-result-id"] == again.headers["x-result-id"]
        assert first.content == again.content


# --- lengths --------------------------------------------------------------------------------------


@pytest.fixture
async def small(settings: Settings, tmp_path: Path) -> AsyncIterator[Service]:
    """A model of 20 tokens, each of them a word; a request has 40 log probabilities."""
    write_model(tmp_path, "scripted", max_model_len=20, template=CHAT_TEMPLATE)
    with_model = settings.model_copy(update={"model_repository": tmp_path, "max_logprobs": 40})
    async with run_service(with_model, with_worker=True) as running:
        yield running


async def test_what_is_left_is_the_default_length(small: Service) -> None:
    answer = await small.client.post("/generate", json=body("a b c"))
    (result,) = await results_of(small, answer)
    assert result["parameters"]["max_tokens"] == 17
    assert result["finish_reason"] == "length"
    many = body("a b c", details=True, top_n_tokens=4)
    (result,) = await results_of(small, await small.client.post("/generate", json=many))
    assert result["parameters"]["max_tokens"] == 40 // 5


async def test_prompts_that_are_too_long(small: Service) -> None:
    words = " ".join("abcdefghijklmnopqrst")
    answer = await small.client.post("/generate", json=body("a b c", max_new_tokens=18))
    assert assert_error(answer, 422, "validation") == (
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 20. "
        "Given: 3 `inputs` tokens and 18 `max_new_tokens`"
    )
    answer = await small.client.post("/generate", json=body(words))
    assert assert_error(answer, 422, "validation") == (
        "Input validation error: `inputs` must have less than 20 tokens. Given: 20"
    )
    truncated = body(words, truncate=5, return_full_text=True)
    answer = await small.client.post("/generate", json=truncated)
    (result,) = await results_of(small, answer)
    context = await small.client.get(f"/contexts/{result['context_id']}")
    assert context.json()["content"] == "p q r s t"
    assert result["usage"]["prompt_tokens"] == 5
    assert result["parameters"]["max_tokens"] == 15
    assert answer.json()["generated_text"] == words + result["result"]
    for wrong in (0, 20):
        answer = await small.client.post("/generate", json=body(words, truncate=wrong))
        assert assert_error(answer, 422, "validation") == (
            "Input validation error: `truncate` must be strictly positive and less than 20. "
            f"Given: {wrong}"
        )


async def test_without_a_tokenizer(service: Service) -> None:
    answer = await service.client.post("/generate", json=body(HELLO, truncate=3))
    assert "`truncate` is not supported" in assert_error(answer, 422, "validation")
    messages = [{"role": "user", "content": "a"}]
    for path, content in (
        ("/tokenize", {"inputs": "a"}),
        ("/chat_tokenize", {"messages": messages}),
    ):
        answer = await service.client.post(path, json=content)
        assert "tokenizer" in assert_error(answer, 404, "not_found")


@pytest.mark.trial
async def test_without_a_chat_template(settings: Settings, tmp_path: Path) -> None:
    write_model(tmp_path, "scripted")
    without = settings.model_copy(update={"model_repository": tmp_path})
    async with run_service(without, with_worker=False) as running:
        messages = [{"role": "user", "content": "a"}]
        answer = await running.client.post("/chat_tokenize", json={"messages": messages})
        assert "no chat template" in assert_error(answer, 422, "validation")


async def test_tokens_of_a_prompt(small: Service) -> None:
    answer = await post(small, {"inputs": "äh b"}, "/tokenize")
    assert answer == [
        {"id": 0, "text": "äh", "start": 0, "stop": 2},
        {"id": 0, "text": "b", "start": 3, "stop": 4},
    ]
    text = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    chat = await post(small, {"messages": [{"role": "user", "content": text}]}, "/chat_tokenize")
    assert chat["templated_text"] == "<user> hi <assistant>"
    assert [token["text"] for token in chat["tokenize_response"]] == ["<user>", "hi", "<assistant>"]
    wrong = {"messages": [{"role": "stranger", "content": "x"}]}
    refused = await small.client.post("/chat_tokenize", json=wrong)
    assert "unknown role stranger" in assert_error(refused, 422, "template_error")
    picture = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
    refused = await small.client.post("/chat_tokenize", json=picture)
    assert "not supported" in assert_error(refused, 422, "validation")


async def test_what_is_known_of_model_and_service(small: Service, service: Service) -> None:
    info = (await small.client.get("/info")).json()
    assert info["model_id"] == "scripted"
    assert (info["max_input_tokens"], info["max_total_tokens"]) == (19, 20)
    assert (info["max_best_of"], info["max_stop_sequences"]) == (16, 16)
    unknown = (await service.client.get("/info?model=scripted")).json()
    assert (unknown["max_input_tokens"], unknown["max_total_tokens"]) == (None, None)
    assert_error(await service.client.get("/info?model=nobody"), 404, "unknown_model")
    for path in ("/", "/ping", "/health"):
        answer = await service.client.get(path)
        assert (answer.status_code, answer.content) == (200, b"")


async def test_times_are_told_in_headers(service: Service) -> None:
    inputs = "hällo {{chunks=4 delay_ms=20}}"
    answer = await service.client.post("/generate", json=body(inputs))
    (result,) = await results_of(service, answer)
    headers = answer.headers
    assert headers["x-compute-characters"] == str(len(inputs))
    assert headers["x-prompt-tokens"] == str(result["usage"]["prompt_tokens"])
    assert headers["x-generated-tokens"] == "4"
    assert "x-compute-type" not in headers
    names = ("validation", "queue", "inference", "total")
    times = {name: int(headers[f"x-{name}-time"]) for name in names}
    started, finished = (
        datetime.fromisoformat(result[name]) for name in ("started_at", "finished_at")
    )
    assert times["inference"] == int((finished - started).total_seconds() * 1000)
    assert times["total"] >= times["inference"]
    assert int(headers["x-time-per-token"]) <= times["inference"] // 4
    assert float(headers["x-compute-time"]) * 1000 >= times["total"]
    streamed = await service.client.post("/generate_stream", json=body(inputs))
    assert streamed.headers["x-compute-characters"] == str(len(inputs))


# --- refusals -------------------------------------------------------------------------------------


async def test_values_out_of_their_bounds(api: Service) -> None:
    """A fault of each step: the shape, TGI's rules, the engine's parameters."""
    for parameters, text in (
        ({"temperature": "1"}, "`parameters.temperature` Input should be a valid number"),
        ({"temperature": 0}, "`temperature` must be strictly positive"),
        ({"stop": [""]}, "`stop.0` String should have at least 1 character"),
    ):
        for path in ("/generate", "/"):
            answer = await api.client.post(path, json=body(HELLO, **parameters))
            assert assert_error(answer, 422, "validation") == f"Input validation error: {text}"
    assert (await api.client.get("/results/")).json() == []


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (
            {"best_of": 2, "do_sample": True},
            "`best_of` != 1 is not supported when streaming tokens",
        ),
        (
            {"decoder_input_details": True},
            "`decoder_input_details` == true is not supported when streaming tokens",
        ),
    ],
)
async def test_what_streams_cannot_do(api: Service, parameters: dict[str, Any], text: str) -> None:
    for path, more in (("/generate_stream", {}), ("/", {"stream": True})):
        answer = await api.client.post(path, json=body(HELLO, **parameters) | more)
        assert assert_error(answer, 422, "validation") == f"Input validation error: {text}"


@pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream"])
async def test_bodies_that_are_none(api: Service, path: str) -> None:
    answer = await api.client.post(path, json={"inputs": ""})
    text = assert_error(answer, 422, "validation")
    assert text == "Input validation error: `inputs` cannot be empty"
    for content in (b"", b"{", b"[]", b"{}", b'{"inputs": 1}', b'{"inputs": "\\u0000"}'):
        headers = {"content-type": "application/json"}
        answer = await api.client.post(path, content=content, headers=headers)
        assert assert_error(answer, 422, "validation").startswith("Input validation error: ")
    answer = await api.client.post(path, content=b"inputs=x")
    assert_error(answer, 415, "unsupported_media_type")
    assert_error(await api.client.put(path), 405, "method_not_allowed")
    answer = await api.client.post(path, json={"inputs": "x", "model": "nobody"})
    assert_error(answer, 404, "unknown_model")


async def test_generations_that_fail(service: Service) -> None:
    for path in ("/generate", "/"):
        answer = await service.client.post(path, json=body("{{fail_at=2 chunks=3}}"))
        text = assert_error(answer, 424, "generation")
        assert text.startswith("Request failed during generation: ")
        (result,) = await results_of(service, answer)
        assert result["error"]["code"] == "model_error"
    answer = await service.client.post("/generate", json=body("{{refuse}}"))
    assert "refuses" in assert_error(answer, 422, "validation")


@pytest.mark.parametrize(
    ("script", "kind"), [("fail_at", "generation"), ("lost_at", "incomplete_generation_stream")]
)
async def test_streams_that_fail(service: Service, script: str, kind: str) -> None:
    inputs = f"x {{{{chunks=9 delay_ms=30 {script}=3}}}}"
    *events, last = await stream(service, inputs)
    assert 0 < len(events) <= 3
    assert all(event["generated_text"] is None for event in events)
    assert set(last) == {"error", "error_type"}
    assert last["error_type"] == kind


async def test_a_full_queue_is_an_overloaded_model(api: Service) -> None:
    full = api.services.settings.model_copy(update={"max_queued": 1})
    async with run_service(full, with_worker=False) as running:
        await send(running, "x")
        answer = await running.client.post("/generate", json=body(HELLO))
        assert assert_error(answer, 429, "overloaded") == "Model is overloaded"
        assert int(answer.headers["retry-after"]) > 0
        assert len((await running.client.get("/results/")).json()) == 1


async def test_the_default_model(settings: Settings) -> None:
    for name, status in (("scripted", 200), ("nobody", 404)):
        named = settings.model_copy(update={"default_model": name})
        async with run_service(named, with_worker=True) as running:
            answer = await running.client.post("/generate", json=body(HELLO))
            assert answer.status_code == status, answer.text
            placeholder = body(HELLO) | {"model": "tgi"}
            answer = await running.client.post("/generate", json=placeholder)
            assert answer.status_code == status, answer.text
            chosen = body(HELLO) | {"model": "scripted"}
            assert (await running.client.post("/generate", json=chosen)).status_code == 200


async def test_several_models_are_ready(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.services.registry, "ready", lambda: ["b", "a"])
    answer = await service.client.post("/generate", json=body(HELLO))
    assert assert_error(answer, 422, "validation") == (
        "Input validation error: `model` must be given: a, b are ready, and LLM_DEFAULT_MODEL "
        "names none"
    )
    answer = await service.client.post("/inference", json={"text": HELLO})
    assert answer.status_code == 400
    assert "LLM_DEFAULT_MODEL" in answer.json()["message"]


@pytest.mark.trial
async def test_no_model_is_ready(service: Service) -> None:
    answer = await service.client.post("/models/scripted/unload")
    try:
        answer = await service.client.post("/generate", json=body(HELLO))
        assert "LLM_DEFAULT_MODEL" in assert_error(answer, 503, "model_not_ready")
        assert int(answer.headers["retry-after"]) > 0
    finally:
        answer = await service.client.post("/models/scripted/load")
        assert answer.status_code == 200, answer.text


# --- clients that leave ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
@pytest.mark.parametrize("policy", ["cancel", "continue"])
async def test_a_tgi_client_that_leaves(settings: Settings, path: str, policy: str) -> None:
    headers = {"X-On-Disconnect": policy} if policy == "continue" else {}
    count = 200 if policy == "cancel" else 20
    inputs = f"slow {{{{chunks={count} delay_ms=50}}}}"
    async with serve(settings, with_worker=True) as service:

        async def running() -> list[dict[str, Any]]:
            results: list[dict[str, Any]] = (await service.client.get("/results/?full=true")).json()
            return [result for result in results if result["started_at"]]

        async with httpx.AsyncClient(base_url=service.client.base_url) as client:
            content = body(inputs, max_new_tokens=200)
            asking = asyncio.create_task(client.post(path, json=content, headers=headers))
            (result,) = await until(running)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        ended = await read(service, result["id"], wait=30)
    if policy == "cancel":
        assert ended["error"]["code"] == "cancelled"
    else:
        assert ended["usage"]["completion_tokens"] == count
