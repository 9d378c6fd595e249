"""`MODEL=`: repository entries for other architectures, served by real vLLM."""

import asyncio
import shutil
from pathlib import Path

import orjson
import pytest

from app.cli.up.triton import EmbeddedTriton
from app.inference.model_repository import write_entry
from app.provisioning.sizing.cache import CacheShape
from app.provisioning.sizing.config_file import read_config
from app.provisioning.sizing.facts import GIB
from tests.conftest import TRITON_VENV, Service, make_settings, run_service
from tests.e2e.cache_reports import BLOCK_TOKENS, CacheReport, last_report
from tests.postgres import PostgresServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", ["bloom", "llama-int8", "qwen"])
async def test_serves(
    name: str,
    entries: dict[str, Path],
    tmp_path: Path,
    postgres_server: PostgresServer,
    database_name: str,
) -> None:
    log_file = tmp_path / "triton.log"
    if name == "qwen":
        entries = {name: with_defaults(entries[name], tmp_path / name, {"top_k": 1})}
    triton = EmbeddedTriton(TRITON_VENV, tmp_path / "work", {name: entries[name]}, log_file)
    await triton.start()
    try:
        settings = make_settings(
            postgres_server,
            database_name,
            triton,
            model_repository=triton.environment["LLM_MODEL_REPOSITORY"],
        )
        async with run_service(settings, with_worker=True) as service:
            bodies: list[dict[str, object]] = [
                {"model": name, "content": f"prompt {number}", "parameters": {"max_tokens": 8}}
                for number in range(4)
            ]
            if name == "qwen":  # the one with a chat template
                messages = [{"role": "user", "content": "hello"}]
                bodies.append(
                    {"model": name, "messages": messages, "parameters": {"max_tokens": 8}}
                )
            answers = await asyncio.gather(
                *(
                    service.client.post("/results/", json=body, headers={"Prefer": "wait=60"})
                    for body in bodies
                )
            )
            results = [answer.json() for answer in answers]
            assert {item["state"] for item in results} == {"completed"}, results
            assert all(0 < item["usage"]["completion_tokens"] <= 8 for item in results)
            # One token a byte: the count at the door is the engine's.
            assert results[0]["usage"]["prompt_tokens"] == len("prompt 0")
            too_long = {"model": name, "content": "x" * 5000}
            refused = await service.client.post("/results/", json=too_long)
            assert refused.status_code == 422
            if name == "qwen":
                await check_defaults(service)
    finally:
        await triton.stop()
    check_cache(last_report(log_file), entries[name] / "1" / "weights")


def with_defaults(entry: Path, copy: Path, defaults: dict[str, float]) -> Path:
    """A copy of an entry, whose model has these sampling parameters in its generation_config.json."""
    shutil.copytree(entry, copy)  # the weights too, which are a link
    file = copy / "1" / "weights" / "generation_config.json"
    file.write_bytes(orjson.dumps(orjson.loads(file.read_bytes()) | defaults))
    return copy


async def check_defaults(service: Service) -> None:
    """A request that leaves `top_k` open has the model's, one that sets it its own."""
    shown = (await service.client.get("/models/qwen")).json()
    assert shown["default_parameters"] == {"top_k": 1}

    async def text(**parameters: float) -> str:
        sampling = {"max_tokens": 16, "ignore_eos": True} | parameters
        body = {"model": "qwen", "content": "x", "parameters": sampling}
        answer = await service.client.post("/results/", json=body, headers={"Prefer": "wait=60"})
        return str(answer.json()["result"])

    greedy = await text(temperature=0)
    assert await text() == await text(temperature=2) == greedy
    assert await text(top_k=0, temperature=2) != greedy


async def test_a_sequence_at_a_time_has_room_for_the_longest(
    entries: dict[str, Path], tmp_path: Path
) -> None:
    weights = entries["bloom"] / "1" / "weights"
    entry = tmp_path / "alone"
    # BLOOM's positions have no end: one such sequence takes more than the least cache has.
    write_entry(entry, weights, max_model_len=65_536)
    model_json = entry / "1" / "model.json"
    model_json.write_bytes(
        orjson.dumps(orjson.loads(model_json.read_bytes()) | {"max_num_seqs": 1})
    )
    log_file = tmp_path / "triton.log"
    triton = EmbeddedTriton(TRITON_VENV, tmp_path / "work", {"alone": entry}, log_file)
    try:
        await triton.start()  # which generates a token
    finally:
        await triton.stop()
    report = last_report(log_file)
    assert report.context == 65_536
    assert report.requests >= 1


def check_cache(report: CacheReport, weights: Path) -> None:
    """The engine's use of its memory is as the resource calculator predicts."""
    shape = CacheShape(read_config(weights), 1, 2, in_flight=4096, block_tokens=BLOCK_TOKENS)
    # As our backend gives it to a CPU engine (engine_host.py): 16 MiB are more for all but BLOOM.
    block_bytes = shape.token_bytes * BLOCK_TOKENS
    memory = max(16 << 20, 32 * shape.request_bytes(report.context) + block_bytes)
    assert report.gib == round(memory / GIB, 2)
    assert shape.tokens(memory, report.context) == report.tokens
    assert round(shape.requests(memory, report.context), 2) == report.requests
