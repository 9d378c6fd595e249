"""Entries of a Triton model repository, made of a model's directory for vLLM.

An entry is `<name>/config.pbtxt` and `<name>/1/model.json`, as NVIDIA's vLLM backend reads them:
https://github.com/triton-inference-server/vllm_backend.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from app.core.program import argument
from app.inference.pooling import is_pooling

CONFIG = """backend: "vllm"
max_batch_size: 0
model_transaction_policy { decoupled: True }
instance_group [ { count: 1 kind: KIND_MODEL } ]
parameters: { key: "ENABLE_VLLM_HEALTH_CHECK" value: { string_value: "true" } }
parameters: { key: "REPORT_CUSTOM_METRICS" value: { string_value: "true" } }
"""

# Files of a model. Weights as safetensors only: other formats are pickles, which run code on reading.
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")

# vLLM's own list (vllm.model_executor.layers.quantization); a test holds the two together.
QUANTIZATIONS = (
    "auto_awq", "auto_gptq", "awq", "awq_marlin", "compressed-tensors", "deepseek_v4_fp8",
    "experts_int8", "fbgemm_fp8", "fp8", "fp8_per_block", "fp8_per_channel", "fp8_per_tensor",
    "fp_quant", "gpt_oss_mxfp4", "gptq", "gptq_marlin", "humming", "inc",
    "int8_per_channel_weight_only", "modelopt", "modelopt_fp4", "modelopt_mixed",
    "modelopt_mxfp8", "moe_wna16", "mxfp4", "mxfp8", "nvfp4_per_token", "online", "quark",
    "torchao",
)  # fmt: skip
# Those that vLLM's CPU build has no kernels for; a test shows each of them failing.
NOT_ON_CPU = ("fp8", "fp8_per_tensor", "humming", "mxfp4", "mxfp8")

# A context longer than this costs more key-value cache than a demonstration needs.
DEFAULT_MAX_MODEL_LEN = 4096
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
# Most of their files set `is_encoder_decoder` as well.
_ENCODER_DECODERS = frozenset(
    {
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "fsmt", "led", "longt5", "m2m_100",
        "marian", "mbart", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet",
        "speech_to_text", "switch_transformers", "t5", "t5gemma", "udop", "umt5", "whisper",
    }
)  # fmt: skip
_ENCODER_DECODER_CLASSES = frozenset(
    {
        "BartForConditionalGeneration", "MBartForConditionalGeneration", "MT5ForConditionalGeneration",
        "MarianMTModel", "PegasusForConditionalGeneration", "T5ForConditionalGeneration",
        "T5WithLMHeadModel", "UMT5ForConditionalGeneration", "WhisperForConditionalGeneration",
    }
)  # fmt: skip
NO_ENCODER = (
    "vLLM has no encoder that reads a text, so it cannot generate from a prompt. Choose a decoder-only "
    "model."
)
_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_HUGGING_FACE_ID = re.compile(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+(@[A-Za-z0-9._/-]+)?")


class ModelRepositoryError(Exception):
    """The model cannot be served; the message is one line with the remedy."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The value of `MODEL=`: a directory, or a Hugging Face id with an optional `@revision`."""

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
            f"{argument('MODEL', text)} is neither a directory nor a Hugging Face id such as Qwen/Qwen2.5-0.5B."
        )
    repository_id, _, revision = text.partition("@")
    return ModelSource(
        entry_name(repository_id.split("/")[1]), None, repository_id, revision or "main"
    )


def entry_name(text: str) -> str:
    name = _NAME.sub("-", text).strip("-.")
    if not name:
        raise ModelRepositoryError(f"{text!r} makes no model name; rename the directory.")
    return name


def read_config(weights: Path) -> dict[str, Any]:
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
    if is_encoder_decoder(config):
        raise ModelRepositoryError(
            f"{weights} is an encoder-decoder model ({_kind(config)}): {NO_ENCODER}"
        )
    if _is_bitsandbytes(config.get("quantization_config")):
        raise ModelRepositoryError(
            f"{weights} is quantized with bitsandbytes, which vLLM no longer reads: choose the "
            f"unquantized model, and fp8_per_channel or another method with {argument('QUANTIZATION')}."
        )
    if not any(weights.glob("*.safetensors")):
        raise ModelRepositoryError(
            f"{weights} holds no *.safetensors: convert the weights (other formats can run code)."
        )
    return config


def is_encoder_decoder(config: Mapping[str, Any]) -> bool:
    """Return if a config.json is that of a model that reads its input with an encoder of its own."""
    nested, classes = config.get("text_config"), config.get("architectures")
    parts = [config, *([nested] if isinstance(nested, dict) else [])]
    if any(part.get("is_encoder_decoder") is True for part in parts):
        return True
    if any(str(part.get("model_type")) in _ENCODER_DECODERS for part in parts):
        return True
    names = classes if isinstance(classes, list) else []
    return any(str(name) in _ENCODER_DECODER_CLASSES for name in names)


def _kind(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or [config.get("model_type") or "by its configuration"]
    return ", ".join(str(name) for name in names)


def _is_bitsandbytes(quantized: object) -> bool:
    """True for weights of bitsandbytes; the files of its first versions do not name the method."""
    if not isinstance(quantized, dict):
        return False
    loads = quantized.get("load_in_8bit") is True or quantized.get("load_in_4bit") is True
    return quantized.get("quant_method", "bitsandbytes" if loads else None) == "bitsandbytes"


def check_quantization(name: str | None, *, on_cpu: bool) -> None:
    """Raise ModelRepositoryError for a quantization that vLLM does not support here."""
    if name is None:
        return
    known = [one for one in QUANTIZATIONS if not (on_cpu and one in NOT_ON_CPU)]
    if name in known:
        return
    place = "on a CPU" if on_cpu else "here"
    raise ModelRepositoryError(
        f"{argument('QUANTIZATION', name)} is not a method of vLLM {place}: choose one of {', '.join(known)}."
    )


def write_entry(
    entry: Path,
    weights: Path,
    *,
    quantization: str | None = None,
    max_model_len: int | None = None,
    engine: Mapping[str, Any] | None = None,
    with_files: bool = False,
) -> None:
    """Write the entry directory `<name>` that serves `weights`, replacing an earlier one.

    `1/weights` is a link to the weights, or, `with_files`, a directory of them for a container that
    sees only the repository. The path in model.json is valid wherever the repository is mounted as
    `models`. `engine` overrides the engine's arguments. The entry appears as a whole or not at all.
    """
    config = read_config(weights)
    unfinished = entry.with_name(f".{entry.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    version = unfinished / "1"
    version.mkdir(parents=True)
    if with_files:
        _take_files(weights, version / "weights")
    else:
        (version / "weights").symlink_to(weights.resolve(), target_is_directory=True)
    is_sentence_transformer = (weights / "modules.json").is_file()
    pools = is_pooling(config, is_sentence_transformer=is_sentence_transformer)
    arguments: dict[str, Any] = {
        "model": f"models/{entry.name}/1/weights",
        # BLOOM's positions are relative (ALiBi): its configuration names no length.
        "max_model_len": max_model_len or min(model_length(config) or 2048, DEFAULT_MAX_MODEL_LEN),
        "gpu_memory_utilization": 0.9,
        **({"quantization": quantization} if quantization else {}),
        **({"runner": "pooling"} if pools else {}),
        **(engine or {}),
    }
    (version / "model.json").write_bytes(orjson.dumps(arguments, option=orjson.OPT_INDENT_2))
    (unfinished / "config.pbtxt").write_text(CONFIG)
    shutil.rmtree(entry, ignore_errors=True)
    unfinished.rename(entry)


def _take_files(weights: Path, directory: Path) -> None:
    """Fill `directory` with a model's files: hard links if the file system permits, else copies.

    Raises ModelRepositoryError if a file cannot be written.
    """
    try:
        for file in _model_files(weights):
            target = directory / file.relative_to(weights)
            target.parent.mkdir(parents=True, exist_ok=True)
            source = file.resolve()  # a Hugging Face cache holds links to its blobs
            try:
                os.link(source, target)
            except OSError:  # another file system, or another user's file
                shutil.copyfile(source, target)
    except OSError as error:
        raise ModelRepositoryError(
            f"{error.filename2 or error.filename}: {error.strerror}: the model's files cannot be "
            f"put into {directory}."
        ) from error


def _model_files(weights: Path) -> Iterator[Path]:
    for pattern in MODEL_FILES:
        for file in weights.rglob(pattern):
            parts = file.relative_to(weights).parts
            if file.is_file() and not any(part.startswith(".") for part in parts):
                yield file


def model_length(config: dict[str, Any]) -> int | None:
    """The maximum sequence length in a config.json, under the key of any model family."""
    nested = config.get("text_config", config)
    return next((int(nested[key]) for key in _LENGTH_KEYS if nested.get(key)), None)
