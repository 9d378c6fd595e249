"""LoRA adapters on real vLLM: each request has the output of its own adapter."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.cli.up.triton import EmbeddedTriton
from app.inference.model_repository import write_entry
from tests.conftest import TRITON_VENV, Service, make_settings, run_service, run_triton
from tests.postgres import PostgresServer
from tests.triton_streams import ModelError, ask, collect

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PROMPT = "the wool of"
ENGINE = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "dtype": "float32"}
SAMPLING = {"temperature": 0, "ignore_eos": True, "max_tokens": 12}


@pytest.fixture(scope="module")
def entry(entries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The entry `herd`: the tiny model that takes tools, with the adapters dog and sheep."""
    weights = entries["tools"] / "1" / "weights"
    directory = tmp_path_factory.mktemp("repository") / "herd"
    write_entry(directory, weights, engine=ENGINE)
    adapters = directory / "1" / "adapters"
    maker = Path(__file__).with_name("make_adapters.py")
    python = TRITON_VENV / "bin" / "python"
    subprocess.run([python, "-I", maker, weights, adapters, PROMPT], check=True)
    # Relative, as the path of the weights: valid wherever the repository is mounted as `models`.
    paths = {name: f"models/herd/1/adapters/{name}" for name in ("dog", "sheep")}
    (directory / "1" / "multi_lora.json").write_bytes(orjson.dumps(paths))
    return directory


@pytest.fixture(scope="module")
def expected(entry: Path) -> dict[str, list[int]]:
    """The tokens that transformers generates, by the adapter's name."""
    found: dict[str, list[int]] = json.loads((entry / "1/adapters/expected.json").read_text())
    assert len({tuple(tokens) for tokens in found.values()}) == 3
    return found


@pytest.fixture(scope="module")
def herd(entry: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTriton]:
    with run_triton(EmbeddedTriton, tmp_path_factory.mktemp("herd"), {"herd": entry}) as server:
        yield server


@pytest.fixture
async def service(
    postgres_server: PostgresServer, database_name: str, herd: EmbeddedTriton
) -> AsyncIterator[Service]:
    repository = herd.environment["LLM_MODEL_REPOSITORY"]
    settings = make_settings(postgres_server, database_name, herd, model_repository=repository)
    async with run_service(settings, with_worker=True) as running:
        yield running


def name_of(adapter: str) -> str:
    return f"herd:{adapter}" if adapter else "herd"


async def test_each_has_the_output_of_merged_weights(
    service: Service, expected: dict[str, list[int]]
) -> None:
    """The requests run side by side, with several adapters in a step of the engine."""
    bodies = [
        {"model": name_of(adapter), "content": PROMPT, "parameters": SAMPLING | {"logprobs": 0}}
        for adapter in [*expected] * 2
    ]
    answers = await asyncio.gather(
        *(
            service.client.post("/results/", json=one, headers={"Prefer": "wait=60"})
            for one in bodies
        )
    )
    for body, answer in zip(bodies, answers, strict=True):
        result = answer.json()
        assert result["state"] == "completed", result
        adapter = str(body["model"]).removeprefix("herd").removeprefix(":")
        assert ids_of(result["logprobs"]) == expected[adapter]
        assert result["parameters"].get("lora_name", "") == adapter


def ids_of(logprobs: list[Any]) -> list[int]:
    return [int(next(iter(one))) for one in logprobs]


async def test_a_lost_text_continues_with_its_adapter(
    herd: EmbeddedTriton, service: Service, expected: dict[str, list[int]]
) -> None:
    for adapter in ("dog", "sheep"):
        sampling = SAMPLING | {"lora_name": adapter}
        whole = await collect(
            herd, ask("herd", PROMPT, sampling, stream=True, return_token_ids=True)
        )
        ids = [one for response in whole for one in response["token_ids"]]
        assert ids == expected[adapter]
        first = ask(
            "herd", PROMPT, sampling | {"max_tokens": 5}, stream=True, return_token_ids=True
        )
        begun = await collect(herd, first)
        text = "".join(response["text_output"][0] for response in begun)
        rest = await collect(
            herd,
            ask(
                *("herd", PROMPT, sampling),
                stream=True,
                return_token_ids=True,
                resume_token_ids=ids[:5],
                resume_text=text,
            ),
        )
        assert [one for response in rest for one in response["token_ids"]] == ids[5:]


async def test_the_engine_refuses_an_unknown_adapter_by_name(herd: EmbeddedTriton) -> None:
    with pytest.raises(ModelError, match="unknown lora_name 'cat'; known: dog, sheep"):
        await collect(herd, ask("herd", PROMPT, SAMPLING | {"lora_name": "cat"}, stream=True))


async def test_the_lists_have_them(service: Service) -> None:
    (model,) = (await service.client.get("/models/")).json()
    assert (model["name"], model["adapters"]) == ("herd", ["dog", "sheep"])
