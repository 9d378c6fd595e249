"""Entries of a Triton model repository: from a model's directory to something vLLM serves.

An entry is `<name>/config.pbtxt` and `<name>/1/model.json`, as NVIDIA's vLLM backend reads them:
https://github.com/triton-inference-server/vllm_backend.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

CONFIG = """backend: "vllm"
max_batch_size: 0
model_transaction_policy { decoupled: True }
instance_group [ { count: 1 kind: KIND_MODEL } ]
parameters: { key: "ENABLE_VLLM_HEALTH_CHECK" value: { string_value: "true" } }
parameters: { key: "REPORT_CUSTOM_METRICS" value: { string_value: "true" } }
"""

# A context longer than this costs more key-value cache than a demonstration needs.
DEFAULT_MAX_MODEL_LEN = 4096
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_HUGGING_FACE_ID = re.compile(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+(@[A-Za-z0-9._/-]+)?")


class ModelRepositoryError(Exception):
    """The model cannot be served; the message is one line with the remedy."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What `MODEL=` named: a directory, or a Hugging Face id with an optional `@revision`."""

    name: str
    directory: Path | None
    repository_id: str = ""
    revision: str = ""


def parse_source(text: str) -> ModelSource:
    """Read a directory or `owner/name[@revision]`. Raises ModelRepositoryError for neither."""
    directory = Path(text).expanduser()
    if directory.is_dir():
        return ModelSource(entry_name(directory.resolve().name), directory.resolve())
    if not _HUGGING_FACE_ID.fullmatch(text) or directory.is_absolute():
        raise ModelRepositoryError(
            f"MODEL={text} is neither a directory nor a Hugging Face id such as Qwen/Qwen2.5-0.5B."
        )
    repository_id, _, revision = text.partition("@")
    return ModelSource(
        entry_name(repository_id.split("/")[1]), None, repository_id, revision or "main"
    )


def entry_name(text: str) -> str:
    """A plain name for the entry: what it is called in requests."""
    name = _NAME.sub("-", text).strip("-.")
    if not name:
        raise ModelRepositoryError(f"{text!r} makes no model name; rename the directory.")
    return name


def read_config(weights: Path) -> dict[str, Any]:
    """Read config.json, and check that there are weights in a format that runs no code."""
    try:
        config = orjson.loads((weights / "config.json").read_bytes())
    except FileNotFoundError:
        raise ModelRepositoryError(
            f"{weights} holds no config.json: it is not a model in Hugging Face's layout."
        ) from None
    except orjson.JSONDecodeError as error:
        raise ModelRepositoryError(f"{weights}/config.json is not valid JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ModelRepositoryError(f"{weights}/config.json is not a JSON object.")
    if not any(weights.glob("*.safetensors")):
        raise ModelRepositoryError(
            f"{weights} holds no *.safetensors: convert the weights (other formats can run code)."
        )
    return config


def write_entry(
    entry: Path,
    weights: Path,
    *,
    quantization: str | None = None,
    max_model_len: int | None = None,
) -> None:
    """Write the entry directory `<name>` that serves `weights`, replacing an earlier one.

    The weights stay where they are: `1/weights` links to them, so that model.json's path holds
    wherever the repository is mounted as `models`.
    """
    config = read_config(weights)
    shutil.rmtree(entry, ignore_errors=True)
    version = entry / "1"
    version.mkdir(parents=True)
    (version / "weights").symlink_to(weights.resolve(), target_is_directory=True)
    engine: dict[str, Any] = {
        "model": f"models/{entry.name}/1/weights",
        "max_model_len": max_model_len or _default_length(config),
        "enforce_eager": True,
        "gpu_memory_utilization": 0.9,
    }
    if quantization:
        engine["quantization"] = quantization
    (version / "model.json").write_bytes(orjson.dumps(engine, option=orjson.OPT_INDENT_2))
    (entry / "config.pbtxt").write_text(CONFIG)


def model_length(config: dict[str, Any]) -> int | None:
    """Longest sequence that a config.json names, under any of its families' keys."""
    nested = config.get("text_config", config)
    return next((int(nested[key]) for key in _LENGTH_KEYS if nested.get(key)), None)


def _default_length(config: dict[str, Any]) -> int:
    length = model_length(config)
    # BLOOM's positions are relative (ALiBi): its configuration names no length.
    return min(length or 2048, DEFAULT_MAX_MODEL_LEN)
