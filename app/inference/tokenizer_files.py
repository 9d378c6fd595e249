"""Tokenizer, special tokens, weights' directory and sampling defaults of a model repository's entry."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

_SPECIAL_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


_WEIGHTS = {".safetensors", ".json", ".model", ".jinja", ".bin", ".gguf"}
# vLLM's list: the members of generation_config.json that are defaults of sampling parameters.
_DEFAULTS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty",
)  # fmt: skip


def tokenizer_file(repository: Path, model: str) -> Path | None:
    newest = newest_version(repository, model)
    if newest is None:
        return None
    weights = weights_directory(repository, newest.parent, str(read_json(newest).get("model", "")))
    file = weights / "tokenizer.json" if weights else None
    return file if file and file.is_file() else None


def repository_with(repositories: Sequence[Path], model: str) -> Path:
    """The first repository that has a model; the first one of all if none has it."""
    found = (one for one in repositories if newest_version(one, model) is not None)
    return next(found, repositories[0])


def newest_version(repository: Path, model: str) -> Path | None:
    found = [
        file for file in (repository / model).glob("*/model.json") if file.parent.name.isdigit()
    ]
    return max(found, key=lambda file: int(file.parent.name), default=None)


def weights_directory(repository: Path, version: Path, model: str) -> Path | None:
    """The directory of config.json; `models/<name>/1` is relative to the repository's parent."""
    candidates = [Path(model), version]
    if model.startswith("models/"):
        candidates.insert(0, repository / model.removeprefix("models/"))
    for candidate in candidates:
        if model and (candidate / "config.json").is_file():
            return candidate
    return None


def read_json(path: Path) -> dict[str, Any]:
    value = orjson.loads(path.read_bytes()) if path.is_file() else {}
    if not isinstance(value, dict):
        raise TypeError(f"{path.name} is not a JSON object")
    return value


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_TOKENS:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def special_ids(tokenizer: Tokenizer | None) -> frozenset[int]:
    if tokenizer is None:
        return frozenset()
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(identifier for identifier, token in added.items() if token.special)


def has_special_token(tokenizer: Tokenizer | None, *texts: str) -> bool:
    """Return if a special token is a part of one of the texts."""
    if tokenizer is None:
        return False
    added = tokenizer.get_added_tokens_decoder().values()
    return any(token.special and token.content in text for token in added for text in texts)


def end_ids(tokenizer: Tokenizer | None, name: str | None, weights: Path) -> frozenset[int]:
    """The ids that the model's files name as ends: the engine stops at some of them."""
    named = tokenizer.token_to_id(name) if tokenizer is not None and name else None
    found = {named} - {None}
    for file in ("config.json", "generation_config.json"):
        given = read_json(weights / file).get("eos_token_id")
        found |= set(given if isinstance(given, list) else [given]) - {None}
    return frozenset(identifier for identifier in found if isinstance(identifier, int))


def revision(engine_file: Path, weights: Path | None) -> str:
    """A digest of a model's files: arguments and adapters of the engine, and names, sizes and times of
    the weights'."""
    digest = hashlib.sha256()
    for file in sorted(engine_file.parent.glob("*.json")):
        digest.update(f"{file.name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}".encode())
    for file in sorted(weights.iterdir()) if weights else ():
        if file.is_file() and file.suffix in _WEIGHTS:
            status = file.stat()
            digest.update(f"\0{file.name}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return digest.hexdigest()


def default_parameters(
    repository: Path, engine: Mapping[str, Any], weights: Path | None
) -> dict[str, float] | None:
    """The sampling parameters that the engine takes where a request leaves them open; None: unknown.

    `engine` are its arguments: `generation_config` is "auto", "vllm" for none, or another directory.
    """
    source = engine.get("generation_config", "auto")
    given: dict[str, Any] = {}
    if source == "auto" and weights is None:
        return None
    if source != "vllm":
        place = str(source).removeprefix("models/")
        directory = weights if source == "auto" else repository / place
        given = read_json(directory / "generation_config.json") if directory else {}
    overridden = engine.get("override_generation_config")
    given |= overridden if isinstance(overridden, dict) else {}
    found = {name: given.get(name) for name in _DEFAULTS}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def leading_token(tokenizer: Tokenizer | None, bos_token: str | None) -> str:
    """The begin token, if the tokenizer itself puts it before every text; else empty."""
    if tokenizer is None or not bos_token:
        return ""
    return bos_token if tokenizer.encode("").ids == [tokenizer.token_to_id(bos_token)] else ""
