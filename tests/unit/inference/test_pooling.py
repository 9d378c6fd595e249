"""Tasks of pooling models, by their files."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from app.inference.model_repository import write_entry
from app.inference.pooling import (
    EmbeddingParameters,
    ScoreParameters,
    is_pooling,
    model_task,
    task_of,
)
from app.inference.prompts import read_format
from app.inference.triton_messages import build_pooling_request


@pytest.mark.parametrize(
    ("engine", "architecture", "task"),
    [
        ({}, "BertModel", None),
        ({"runner": "auto"}, "BertModel", None),
        ({"runner": "pooling"}, "BertModel", "embed"),
        ({"runner": "pooling"}, "Qwen3ForCausalLM", "embed"),
        ({"runner": "pooling"}, "BertForSequenceClassification", "score"),
        ({"runner": "pooling", "convert": "classify"}, "Qwen3ForCausalLM", "score"),
    ],
)
def test_the_task_of_a_model(engine: dict[str, Any], architecture: str, task: str | None) -> None:
    assert model_task(engine, {"architectures": [architecture]}) == task


def test_a_model_without_a_configuration_embeds() -> None:
    assert model_task({"runner": "pooling"}, {}) == "embed"


@pytest.mark.parametrize(
    ("architecture", "pools"),
    [
        ("BertModel", True),
        ("XLMRobertaModel", True),
        ("XLMRobertaForSequenceClassification", True),
        ("LlamaForCausalLM", False),
        ("GPT2LMHeadModel", False),
        ("ChatGLMModel", False),
    ],
)
def test_models_that_pool(architecture: str, pools: bool) -> None:
    config = {"architectures": [architecture]}
    assert is_pooling(config, is_sentence_transformer=False) == pools
    assert is_pooling(config, is_sentence_transformer=True)
    assert not is_pooling({}, is_sentence_transformer=False)


@pytest.mark.parametrize("has_modules", [False, True])
def test_an_entry_names_the_runner(tmp_path: Path, has_modules: bool) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 64}
    (weights / "config.json").write_bytes(orjson.dumps(config))
    (weights / "model.safetensors").write_bytes(b"")
    if has_modules:
        (weights / "modules.json").write_bytes(b"[]")
    repository = tmp_path / "repository"
    write_entry(repository / "m", weights)
    engine = orjson.loads((repository / "m" / "1" / "model.json").read_bytes())
    assert engine.get("runner") == ("pooling" if has_modules else None)
    form = read_format(repository, "m")
    assert form is not None
    assert form.task == ("embed" if has_modules else None)


def test_stored_parameters_name_their_task() -> None:
    embedding = EmbeddingParameters(dimensions=3, normalize=False)
    assert embedding.to_stored() == {"task": "embed", "dimensions": 3, "normalize": False}
    assert ScoreParameters(raw=True).to_stored() == {"task": "score", "raw": True}
    assert task_of(embedding.to_stored()) == "embed"
    assert task_of({"max_tokens": 3}) is None


@pytest.mark.parametrize(
    ("prompt", "parameters", "content"),
    [
        ("text", {"task": "embed", "dimensions": 3}, "text"),
        ("text", {"task": "embed", "prompt_token_ids": [1, 2]}, [1, 2]),
        ('["query","document"]', {"task": "score"}, ["query", "document"]),
    ],
)
def test_the_request_to_a_model(prompt: str, parameters: dict[str, Any], content: object) -> None:
    request = build_pooling_request("m", prompt, parameters, "id")
    asked = orjson.loads(request.raw_input_contents[1][4:])
    parameters.pop("prompt_token_ids", None)
    assert asked == {"input": content, "parameters": parameters}
    assert [one.name for one in request.inputs] == ["text_input", "pooling_request"]
