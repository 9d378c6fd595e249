"""Tiny models of several families on one Triton, each loaded while tests use it."""

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import psutil

from app.inference.model_repository import write_entry
from tests.chaos.stack import MortalTriton
from tests.conftest import TRITON_VENV
from tests.integration.support import until

# Input of make_models.py: a prompt of `tools` and its adapters, texts of `embed` and `rank`.
PROMPT = "the wool of"
TEXTS = ["hello world", "x", "a longer text, with marks!"]
IDS = [2, 5, 6, 3]  # of `ab`, with the tokens around it
QUERY, DOCUMENTS = "what is it", ["it is this", "no", "hello world"]
ADAPTERS = ("dog", "sheep")
# Arguments of `write_entry`, by the model.
_ENTRIES: Mapping[str, dict[str, Any]] = {
    # Its positions have no end: one such sequence takes more than the least cache has.
    "bloom": {"max_model_len": 65_536, "engine": {"max_num_seqs": 1}},
    "embed": {"engine": {"dtype": "float32"}},
    "eye": {"engine": {"dtype": "float32", "limit_mm_per_prompt": {"image": 2}}},
    "qwen-int8": {"quantization": "compressed-tensors"},
    "rank": {"engine": {"dtype": "float32"}},
    "tools": {
        "engine": {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "dtype": "float32"}
    },
}
_UNLOAD_SECONDS = 60.0


class SmallModels(MortalTriton):
    """A Triton that begins without a model."""

    @property
    def repository(self) -> Path:
        return Path(self.environment["LLM_MODEL_REPOSITORY"])

    async def add(self, name: str, entry: Path) -> None:
        """Load a model beside the others."""
        self.models[name] = entry
        if not self.is_down:  # else its start links all of them
            (self.repository / name).symlink_to(entry)
        await self.start()

    async def remove(self, name: str) -> None:
        """Unload a model, which a call that holds it would prevent."""
        del self.models[name]
        if self.is_down:
            return
        async with self.client() as client:

            async def is_unloaded() -> bool:
                index = {one.name: one.reason for one in await client.index()}
                return index.get(name, "unloaded") == "unloaded"

            await client.unload(name)
            await until(is_unloaded, _UNLOAD_SECONDS)
        (self.repository / name).unlink()

    @contextlib.contextmanager
    def serving(self, entries: Mapping[str, Path], *names: str) -> Iterator[None]:
        """Models for fixtures wider than one test."""
        for name in names:
            asyncio.run(self.add(name, entries[name]))
        yield
        for name in names:
            asyncio.run(self.remove(name))

    async def revive(self) -> None:
        """Start it again with its models, if the test before killed it."""
        if self.is_down:
            await self.start()


def engine_of(triton: MortalTriton, model: str) -> psutil.Process:
    """The engine of one of the models, whose parent is the model's own process."""
    (stub,) = (one for one in triton.stubs() if f"/{model}/" in " ".join(one.cmdline()))
    (engine,) = (one for one in stub.children() if "EngineCore" in " ".join(one.cmdline()))
    return engine


def make_models(directory: Path) -> None:
    """Weights, adapters and expected numbers."""
    given = {
        "prompt": PROMPT, "texts": TEXTS, "ids": IDS, "query": QUERY, "documents": DOCUMENTS,
    }  # fmt: skip
    maker = Path(__file__).with_name("make_models.py")
    python = TRITON_VENV / "bin" / "python"
    subprocess.run([python, "-I", maker, directory], input=json.dumps(given), text=True, check=True)


def write_entries(made: Path, repository: Path) -> dict[str, Path]:
    """An entry of a model repository for each model of `make_models`."""
    entries = {name: repository / name for name in _ENTRIES}
    for name, entry in entries.items():
        write_entry(entry, made / "models" / name, **_ENTRIES[name])
    _take_adapters(made, entries["tools"])
    return entries


def _take_adapters(made: Path, entry: Path) -> None:
    (entry / "1" / "adapters").symlink_to(made / "adapters")
    # Relative, as the path of the weights: valid wherever the repository is mounted as `models`.
    paths = {name: f"models/{entry.name}/1/adapters/{name}" for name in ADAPTERS}
    (entry / "1" / "multi_lora.json").write_bytes(orjson.dumps(paths))
