"""TGI's official clients, unmodified, and the curl lines of Tenstorrent's description, on real vLLM."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import httpx
import pytest
import text_generation
from huggingface_hub import InferenceClient, TextGenerationInputGrammarType
from huggingface_hub.errors import HfHubHTTPError, ValidationError

from app.cli.up.triton import EmbeddedTriton
from app.core.settings import Settings
from tests.conftest import Service
from tests.integration.support import serve
from tests.triton_streams import ask, collect

pytestmark = pytest.mark.timeout(300)

PROMPT = "import os\n\n\ndef "
COUNT = 24
LONG = 300  # tokens that take a second or more
T = TypeVar("T")


@pytest.fixture
async def port(vllm_settings: Settings) -> AsyncIterator[Service]:
    """The service behind a real port, in front of the vLLM engine."""
    async with serve(vllm_settings, with_worker=True) as service:
        yield service


@pytest.fixture
def url(port: Service) -> str:
    return str(port.client.base_url).rstrip("/")


@pytest.fixture
async def expected(port: Service, vllm_triton: EmbeddedTriton) -> str:
    """The greedy text: by the native API, and by Triton without us, the same."""
    parameters = {"max_tokens": COUNT, "temperature": 0}
    body = {"model": "demo", "content": PROMPT, "parameters": parameters}
    answer = await port.client.post("/results/", json=body, headers={"Prefer": "wait=60"})
    (direct,) = await collect(
        vllm_triton,
        ask("demo", PROMPT, parameters, stream=False, exclude_input_in_output=True),
    )
    text: str = answer.json()["result"]
    assert direct["text_output"] == [text]
    assert text
    return text


async def apart(call: Callable[[], T]) -> T:
    """A client that blocks, beside the loop that serves it."""
    return await asyncio.to_thread(call)


# --- huggingface_hub ------------------------------------------------------------------------------


async def test_inference_client(url: str, expected: str) -> None:
    client = InferenceClient(model=url)
    assert await apart(lambda: client.text_generation(PROMPT, max_new_tokens=COUNT)) == expected
    pieces = await apart(
        lambda: list(client.text_generation(PROMPT, max_new_tokens=COUNT, stream=True))
    )
    assert "".join(pieces) == expected
    assert len(pieces) == COUNT
    full = await apart(
        lambda: client.text_generation(PROMPT, max_new_tokens=COUNT, return_full_text=True)
    )
    assert full == PROMPT + expected


async def test_inference_client_with_details(url: str, port: Service, expected: str) -> None:
    client = InferenceClient(base_url=f"{url}/generate")
    whole = await apart(
        lambda: client.text_generation(PROMPT, max_new_tokens=COUNT, details=True, top_n_tokens=2)
    )
    assert whole.generated_text == expected
    details = whole.details
    assert details is not None
    assert (details.finish_reason, details.generated_tokens) == ("length", COUNT)
    assert details.seed is None
    assert "".join(token.text for token in details.tokens) == expected
    model = await port.services.registry.find("demo")
    assert model.format is not None
    assert model.format.tokenizer is not None
    assert model.format.tokenizer.decode([token.id for token in details.tokens]) == expected
    top_tokens: Any = details.top_tokens  # the client leaves them as they are
    for token, top in zip(details.tokens, top_tokens, strict=True):
        assert top[0]["id"] == token.id, "greedy takes the likeliest"
        assert top[0]["logprob"] >= top[1]["logprob"]
    streaming = InferenceClient(base_url=f"{url}/generate_stream")
    events = await apart(
        lambda: list(
            streaming.text_generation(PROMPT, max_new_tokens=COUNT, details=True, stream=True)
        )
    )
    assert [event.index for event in events] == list(range(1, COUNT + 1))
    assert [event.token.id for event in events] == [token.id for token in details.tokens]
    assert [event.token.text for event in events] == [token.text for token in details.tokens]
    assert events[-1].generated_text == expected
    assert events[-1].details is not None
    assert events[-1].details.input_length == await model.format.count_tokens(PROMPT)


async def test_inference_client_samples_and_ranks(url: str) -> None:
    client = InferenceClient(model=url)
    sample: dict[str, Any] = {
        "do_sample": True,
        "temperature": 1.5,
        "max_new_tokens": 8,
        "details": True,
    }
    best: Any = await apart(lambda: client.text_generation(PROMPT, best_of=4, **sample))
    others = best.details.best_of_sequences
    assert len(others) == 3

    totals = [sum(token.logprob for token in one.tokens) for one in (best.details, *others)]
    assert totals[0] == max(totals)
    assert len({best.details.seed, *(other.seed for other in others)}) == 4
    again: Any = await apart(
        lambda: client.text_generation(PROMPT, seed=best.details.seed, **sample)
    )
    assert again.generated_text == best.generated_text


async def test_inference_client_stops_and_follows_grammars(url: str, expected: str) -> None:
    client = InferenceClient(model=url)
    stop = expected[5:8]
    found: Any = await apart(
        lambda: client.text_generation(PROMPT, max_new_tokens=COUNT, stop=[stop], details=True)
    )
    assert found.generated_text == expected[: expected.index(stop) + len(stop)]
    assert found.details.finish_reason == "stop_sequence"
    regex = TextGenerationInputGrammarType(type="regex", value="[0-9]{4}")
    digits = await apart(lambda: client.text_generation(PROMPT, max_new_tokens=9, grammar=regex))
    assert re.fullmatch("[0-9]{4}", digits)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["a"],
        "additionalProperties": False,
    }
    shaped = TextGenerationInputGrammarType(type="json", value=schema)
    text = await apart(lambda: client.text_generation(PROMPT, max_new_tokens=60, grammar=shaped))
    assert set(json.loads(text)) == {"a"}


async def test_events_of_ends_and_of_pieces_of_characters(port: Service) -> None:
    async def events(**parameters: Any) -> list[dict[str, Any]]:
        body = {"inputs": PROMPT, "parameters": {"details": True, **parameters}}
        answer = await port.client.post("/generate_stream", json=body)
        return [json.loads(line[5:]) for line in answer.text.splitlines() if line[:5] == "data:"]

    grammar = {"type": "regex", "value": "[é🙂]{4}"}
    found = await events(max_new_tokens=60, grammar=grammar)
    *pieces, end = found
    assert end["token"]["special"]
    assert end["token"]["id"] == 0
    assert end["details"]["finish_reason"] == "eos_token"
    assert re.fullmatch("[é🙂]{4}", end["generated_text"])
    texts = [piece["token"]["text"] for piece in pieces]
    assert "".join(texts) == end["generated_text"]
    assert "" in texts, "a piece of a character has no text"
    assert not any("\ufffd" in text for text in texts)
    assert end["details"]["generated_tokens"] == len(found) == end["index"]

    whole = await events(max_new_tokens=COUNT)
    stop = whole[5]["token"]["text"]
    stopped = await events(max_new_tokens=COUNT, stop=[stop])
    assert stopped[-1]["details"]["finish_reason"] == "stop_sequence"
    assert stopped[-1]["generated_text"].endswith(stop)
    assert stopped[-1]["generated_text"] == "".join(one["token"]["text"] for one in stopped)


async def test_truncated_prompts(url: str, port: Service) -> None:
    client = InferenceClient(model=url)
    prompt = "# äöü 🙂 comment\n" * 20 + PROMPT
    for keep in (1, 2, 5, 20, 50):
        answer = await port.client.post(
            "/generate",
            json={"inputs": prompt, "parameters": {"truncate": keep, "max_new_tokens": 2}},
        )
        found = int(answer.headers["x-prompt-tokens"])
        assert found <= max(keep, 2), "one token beside the one that begins a prompt"
        assert keep - found < 3
    text = await apart(lambda: client.text_generation(prompt, truncate=50, max_new_tokens=4))
    assert text


async def test_inference_client_receives_the_reason(url: str) -> None:
    client = InferenceClient(model=url)
    with pytest.raises(ValidationError, match="`temperature` must be strictly positive"):
        await apart(lambda: client.text_generation(PROMPT, temperature=0.0))
    with pytest.raises(ValidationError, match="`watermark` is not supported"):
        await apart(lambda: list(client.text_generation(PROMPT, watermark=True, stream=True)))
    with pytest.raises(ValidationError, match="`inputs` must have less than 1024 tokens"):
        await apart(lambda: client.text_generation(PROMPT * 1000))
    elsewhere = InferenceClient(model=f"{url}/nowhere")
    with pytest.raises(HfHubHTTPError):
        await apart(lambda: elsewhere.text_generation(PROMPT))


async def test_tokens_and_info(port: Service) -> None:
    model = await port.services.registry.find("demo")
    assert model.format is not None
    answer = await port.client.post("/tokenize", json={"inputs": "def 🙂"})
    tokens = answer.json()
    assert len(tokens) == await model.format.count_tokens("def 🙂")
    assert tokens[0] == {"id": 0, "text": "", "start": 0, "stop": 0}
    chat = await port.client.post(
        "/chat_tokenize", json={"messages": [{"role": "user", "content": "What is os?"}]}
    )
    text = chat.json()["templated_text"]
    assert "What is os?" in text
    assert len(chat.json()["tokenize_response"]) > 3
    info = (await port.client.get("/info")).json()
    assert (info["model_id"], info["max_total_tokens"]) == ("demo", 1024)


# --- text-generation ------------------------------------------------------------------------------

# It speaks to pydantic in words that are to go with pydantic 3.
OLD_WORDS = pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")


@OLD_WORDS
async def test_text_generation_client(url: str, expected: str) -> None:
    client = text_generation.Client(url, timeout=60)
    whole = await apart(lambda: client.generate(PROMPT, max_new_tokens=COUNT))
    assert whole.generated_text == expected
    assert whole.details.finish_reason == text_generation.types.FinishReason.Length
    assert "".join(token.text for token in whole.details.tokens) == expected
    events = await apart(lambda: list(client.generate_stream(PROMPT, max_new_tokens=COUNT)))
    assert "".join(event.token.text for event in events) == expected
    assert len(events) == COUNT
    assert events[-1].generated_text == expected
    assert events[-1].details.generated_tokens == COUNT


@OLD_WORDS
async def test_text_generation_async_client(url: str, expected: str) -> None:
    client = text_generation.AsyncClient(url, timeout=60)
    whole = await client.generate(PROMPT, max_new_tokens=COUNT)
    assert whole.generated_text == expected
    best = await client.generate(
        PROMPT, max_new_tokens=4, do_sample=True, best_of=2, top_n_tokens=2
    )
    assert len(best.details.best_of_sequences) == 1
    events = [event async for event in client.generate_stream(PROMPT, max_new_tokens=COUNT)]
    assert "".join(event.token.text for event in events) == expected
    assert events[-1].generated_text == expected


@OLD_WORDS
async def test_text_generation_client_receives_the_reason(url: str) -> None:
    client = text_generation.Client(url, timeout=60)
    with pytest.raises(text_generation.errors.ValidationError, match="`stop` supports up to 16"):
        await apart(lambda: client.generate(PROMPT, stop_sequences=["x"] * 17))
    with pytest.raises(text_generation.errors.ValidationError, match="`inputs` tokens"):
        await apart(lambda: list(client.generate_stream(PROMPT, max_new_tokens=5000)))
    with pytest.raises(text_generation.errors.NotFoundError):
        await apart(lambda: text_generation.Client(f"{url}/generate/x").generate(PROMPT))


# --- Tenstorrent ----------------------------------------------------------------------------------


async def curl(*arguments: str) -> str:
    """The output of curl."""
    ran = await apart(
        lambda: subprocess.run(
            ["curl", "-sS", *arguments], check=True, capture_output=True, text=True
        )
    )
    return ran.stdout


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
async def test_curl_lines_of_the_description(url: str, expected: str) -> None:
    body = {"text": PROMPT, "top_k": "1", "top_p": "0.9", "max_tokens": str(COUNT)}
    body |= {"temperature": "1.0", "stop_sequence": "<|endoftext|>"}
    sent = ("-X", "POST", "-H", "Content-Type: application/json", "-d", json.dumps(body))
    for path in ("/inference/demo", "/inference"):
        printed = await curl("-N", "-i", f"{url}{path}", *sent)
        head, _, text = printed.replace("\r\n", "\n").partition("\n\n")
        assert head.startswith("HTTP/1.1 200")
        assert "transfer-encoding: chunked" in head.lower()
        assert text == expected
    wrong = ("-d", json.dumps(body | {"temperature": "sdfgnskdgjn"}))
    refused = json.loads(
        await curl(f"{url}/inference/demo", "-H", "Content-Type: application/json", *wrong)
    )
    assert refused == {
        "status_code": 400,
        "message": "Parameter: temperature is type=<class 'str'>, expected <class 'float'>",
    }
    form = json.loads(await curl(f"{url}/inference/demo", "-d", json.dumps(body)))
    assert form == {"status_code": 400, "message": "Request was not JSON"}


async def test_a_python_client_that_reads_chunks(url: str, port: Service, expected: str) -> None:
    """A service that waits for its turn joins pieces: a short text may be one chunk."""
    body = {"text": PROMPT, "top_k": 1, "max_tokens": LONG, "stop_sequence": None}
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{url}/inference/demo", json=body) as answer,
    ):
        chunks = [chunk async for chunk in answer.aiter_text()]
    stored = await port.client.get(f"/results/{answer.headers['x-result-id']}")
    text = "".join(chunks)
    assert text == stored.json()["result"]
    assert text.startswith(expected)
    assert len(chunks) > 1
