"""Reads a model's config.json, and what can be seen of its weights without reading them.

Weights are believed before any formula: the sum in the index of a sharded checkpoint
(https://huggingface.co/docs/huggingface_hub/package_reference/serialization), or the headers of its
safetensors files (https://huggingface.co/docs/safetensors: eight bytes of length, then JSON).
"""

import dataclasses
from itertools import islice
from pathlib import Path

import orjson

from app.plan.architecture import read_facts
from app.plan.facts import ModelFacts, PlanError
from app.plan.members import Members

# A config.json has some kilobytes; of quantized models, with names of their layers, some megabytes.
MAX_JSON_BYTES = 16 << 20
# The header of a file with 100,000 tensors.
MAX_HEADER_BYTES = 16 << 20
MAX_FILES = 1000
_INDEX = "model.safetensors.index.json"
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def read_config(path: Path) -> ModelFacts:
    """The facts of a model: `path` is its config.json, or the directory with it.

    Raises PlanError with one line: the file, the member, and what is wrong.
    """
    try:
        is_directory = path.is_dir()
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from None
    file = path / "config.json" if is_directory else path
    document = _json(file)
    try:
        facts = read_facts(document)
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from None
    return _with_stored_weights(facts, path) if is_directory else facts


def _with_stored_weights(facts: ModelFacts, directory: Path) -> ModelFacts:
    index = directory / _INDEX
    if index.is_file() and (total := _index_total(index)) is not None:
        return _stored(facts, total, facts.dtype, _INDEX)
    named = islice(directory.glob("*.safetensors"), MAX_FILES)
    files = sorted(file for file in named if file.is_file())
    single = directory / "model.safetensors"
    if single in files:
        files = [single]
    if not files:
        return facts
    sizes: dict[str, int] = {}
    for file in files:
        _add_header(file, sizes)
    total = sum(sizes.values())
    if not total:
        raise PlanError(f"{files[0]}: holds no tensors")
    dtype = max(sizes, key=lambda name: sizes[name])
    # Of a quantized checkpoint the size does not follow the type that it runs in.
    stored = _STORED.get(dtype) if sizes[dtype] > 0.9 * total else None
    return _stored(facts, total, stored, "the headers of *.safetensors")


def _stored(facts: ModelFacts, total: int, dtype: str | None, source: str) -> ModelFacts:
    note = f"Weights on disk are {total:,} bytes (from {source}): taken in place of the formula."
    return dataclasses.replace(
        facts, stored_bytes=total, stored_dtype=dtype, notes=(*facts.notes, note)
    )


def _index_total(index: Path) -> int | None:
    parsed = _json(index)
    try:
        document = Members(parsed)
        if not document.has("metadata"):
            return None
        size = document.inner("metadata").get("total_size")
        # Some writers divide, and write a whole number as 1.0e9.
        if isinstance(size, float) and size.is_integer():
            size = int(size)
        if size is None:
            return None
        return Members({"total_size": size}, "metadata.").number("total_size", high=1 << 50)
    except PlanError as error:
        raise PlanError(f"{index}: {error}") from None


def _add_header(file: Path, sizes: dict[str, int]) -> None:
    """Add the bytes of its tensors by type. Raises PlanError."""
    try:
        length = file.stat().st_size
        with file.open("rb") as opened:
            header_bytes = int.from_bytes(opened.read(8), "little")
            if header_bytes > min(MAX_HEADER_BYTES, length):
                raise PlanError(f"{file}: is no safetensors file (its header is too long)")
            header = orjson.loads(opened.read(header_bytes))
    except OSError as error:
        raise PlanError(f"{file}: cannot be read: {error.strerror}") from None
    except orjson.JSONDecodeError:
        raise PlanError(f"{file}: is no safetensors file (its header is no JSON)") from None
    if not isinstance(header, dict):
        raise PlanError(f"{file}: is no safetensors file (its header is no JSON object)")
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = tensor["data_offsets"]
            dtype = str(tensor["dtype"])[:16]
        except (KeyError, TypeError, ValueError):
            raise PlanError(f"{file}: tensor {name[:80]!r} has no type or place") from None
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= length:
            raise PlanError(f"{file}: tensor {name[:80]!r} is not inside the file")
        sizes[dtype] = sizes.get(dtype, 0) + end - begin


def _json(file: Path) -> object:
    try:
        if not file.is_file():
            raise PlanError(f"{file}: there is no such file")
        if file.stat().st_size > MAX_JSON_BYTES:
            raise PlanError(f"{file}: is larger than {MAX_JSON_BYTES >> 20} MiB")
        return orjson.loads(file.read_bytes())
    except OSError as error:
        raise PlanError(f"{file}: cannot be read: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise PlanError(f"{file}: is not valid JSON: {error}") from None
