"""Answers of the scripted models, computed by their own pure functions."""

import importlib.util
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import orjson

from tests.chaos.storm.orders import VLLM

_ROOT = Path(__file__).parents[3]
_SCRIPT = _ROOT / "triton" / "models" / "scripted" / "1" / "script.py"
_POOLED = _ROOT / "tests" / "triton_models" / "pooling" / "1" / "pooled.py"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """The whole answer to a request."""

    text: str = ""
    vector: bytes | None = None  # little-endian float32
    prompt_logprobs: Any = None


class ModelAnswers:
    """The scripted models without Triton: the modules beside their `model.py`."""

    def __init__(self) -> None:
        self._script = _load(_SCRIPT)
        self._pooled = _load(_POOLED)

    def of(self, row: Row) -> Answer | None:
        """The answer to a row's request. None for a real engine, whose output differs each time."""
        if row["model_name"] == VLLM:
            return None
        parameters = orjson.loads(row["parameters"])
        if "task" in parameters:
            return Answer(vector=self._vector(row, parameters))
        prompt = row["asked"] if row["prompt"] is None else row["prompt"]
        if "images" in parameters:
            parameters["images"] = self._script.digest_images(_images(row["asked"]))
        wanted = parameters.get("prompt_logprobs")
        scored = None if wanted is None else self._script.write_prompt_logprobs(prompt, wanted)
        try:
            script = self._script.write_script(prompt, parameters)
        except self._script.RefusedError:
            return Answer()
        return Answer("".join(script.chunks), prompt_logprobs=scored and orjson.loads(scored))

    def _vector(self, row: Row, parameters: dict[str, Any]) -> bytes:
        content = orjson.loads(row["prompt"]) if parameters["task"] == "score" else row["asked"]
        numbers = self._pooled.compute(content, parameters)
        return struct.pack(f"<{len(numbers)}f", *numbers)


def stored_numbers(row: Row) -> list[Any] | None:
    """The vector, the score or the prompt's log probabilities of a row, as clients receive them."""
    if (vector := row["vector"]) is not None:
        return list(struct.unpack(f"<{len(vector) // 4}f", vector))
    scored = row["prompt_logprobs"]
    return None if scored is None else list(orjson.loads(scored))


def _images(messages: str) -> list[bytes]:
    """The images of messages, as base64, as the model receives them."""
    images = [one for message in orjson.loads(messages) for one in message.get("images", ())]
    return [one["url"].partition(",")[2].encode() for one in images]


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"scripted_model_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module
