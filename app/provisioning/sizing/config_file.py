"""Reads a model's config.json, and the size of its weights without reading them.

The size of the files takes precedence over the formula, unless files are missing: the sum in the
index of a sharded checkpoint
(https://huggingface.co/docs/huggingface_hub/package_reference/serialization), or the headers of its
safetensors files (https://huggingface.co/docs/safetensors: eight bytes of length, then JSON).
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from app.provisioning.sizing.architecture import read_facts
from app.provisioning.sizing.facts import ModelFacts, PlanError
from app.provisioning.sizing.members import Members
from app.provisioning.sizing.weights import weight_bytes

# A config.json has some kilobytes; of quantized models, with names of their layers, some megabytes.
MAX_JSON_BYTES = 16 << 20
# The header of a file with 100,000 tensors.
MAX_HEADER_BYTES = 16 << 20
MAX_FILES = 1000
_INDEX = "model.safetensors.index.json"
_NUMBERED = re.compile(r"-\d{5}-of-(\d{5})\.safetensors$", re.ASCII)
_VERSION = re.compile(r"[1-9]\d{0,18}", re.ASCII)
_MODEL_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def read_config(path: Path) -> ModelFacts:
    """Read the facts of a model: `path` is its config.json, or the directory with it.

    The directory may be a model's in a Triton repository: its newest version, or the model that
    `model.json` there names. Raises PlanError with one line: the file, the member, and the problem.
    """
    try:
        path = find_model(path)
        is_directory = path.is_dir()
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from None
    file = path / "config.json" if is_directory else path
    with _errors_of(file):
        facts = read_facts(_json(file))
    return _with_stored_weights(facts, path) if is_directory else facts


def find_model(path: Path) -> Path:
    """Directory of the model of an entry of a Triton repository, or of its version; else `path`.

    Raises PlanError, OSError.
    """
    if not path.is_dir() or (path / "config.json").exists():
        return path
    version = path
    if not (path / "model.json").exists():
        numbers = [int(one.name) for one in path.glob("[0-9]*") if _VERSION.fullmatch(one.name)]
        version = path / str(max(numbers, default=0))
        if not version.is_dir():
            return path
    engine = version / "model.json"
    if (version / "config.json").exists() or not engine.exists():
        return version
    with _errors_of(engine):
        named = Members(_json(engine)).text("model")
        if not named:
            raise PlanError("model: missing")
    # Triton resolves `models/NAME/1` against the folder above the repository.
    above = version.resolve().parent.parent.parent
    directory = above / named
    return directory if directory.exists() else Path(named)


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
    if missing := _shortage(files):
        return _noted(facts, f"{missing}: the formula is taken for the weights.")
    sizes: dict[str, int] = {}
    for file in files:
        _add_header(file, sizes)
    total = sum(sizes.values())
    if not total:
        raise PlanError(f"{files[0]}: holds no tensors")
    dtype = max(sizes, key=lambda name: sizes[name])
    # The size of a quantized checkpoint does not follow from the type that it runs in.
    stored = _STORED.get(dtype) if sizes[dtype] > 0.9 * total else None
    return _stored(facts, total, stored, "the headers of *.safetensors")


def _shortage(files: list[Path]) -> str:
    """The missing files of a numbered checkpoint; "" if it is complete."""
    numbered = Counter(found[1] for file in files if (found := _NUMBERED.search(file.name)))
    for count, there in numbered.items():
        if there < int(count):
            return f"Only {there} of {int(count)} files *-of-{count}.safetensors are here"
    return ""


def _stored(facts: ModelFacts, total: int, dtype: str | None, source: str) -> ModelFacts:
    plain = dataclasses.replace(facts, quantization=None)
    formula = weight_bytes(facts, dtype or facts.dtype)
    # A compressed checkpoint may leave some layers as they are. If the formula is only a first guess, both
    # fewer bits and more parts than it counts may be right.
    least, most = formula / 2, 1.5 * weight_bytes(plain, dtype or facts.dtype)
    if not facts.is_exact:
        least, most = formula / 8, math.inf
    if not least <= total <= most:
        note = f"Weights on disk are {total:,} bytes (from {source}), which cannot be right: the"
        return _noted(facts, f"{note} formula's {formula:,} are taken. Is the download whole?")
    note = f"Weights on disk are {total:,} bytes (from {source}): taken in place of the formula."
    return dataclasses.replace(_noted(facts, note), stored_bytes=total, stored_dtype=dtype)


def _noted(facts: ModelFacts, note: str) -> ModelFacts:
    return dataclasses.replace(facts, notes=(*facts.notes, note))


def _index_total(index: Path) -> int | None:
    with _errors_of(index):
        document = Members(_json(index))
        if not document.has("metadata"):
            return None
        size = document.inner("metadata").get("total_size")
        # Some writers divide, and write a whole number as 1.0e9.
        if isinstance(size, float) and size.is_integer():
            size = int(size)
        if size is None:
            return None
        return Members({"total_size": size}, "metadata.").number("total_size", high=1 << 50)


def _add_header(file: Path, sizes: dict[str, int]) -> None:
    """Add the bytes of its tensors by type. Raises PlanError."""
    with _errors_of(file):
        length = file.stat().st_size
        with file.open("rb") as opened:
            header_bytes = int.from_bytes(opened.read(8), "little")
            if header_bytes > min(MAX_HEADER_BYTES, length):
                raise PlanError("is not a safetensors file (its header is too long)")
            content = opened.read(header_bytes)
        try:
            header = orjson.loads(content)
        except orjson.JSONDecodeError:
            raise PlanError("is not a safetensors file (its header is not JSON)") from None
        if not isinstance(header, dict):
            raise PlanError("is not a safetensors file (its header is not a JSON object)")
        for name, tensor in header.items():
            if name != "__metadata__":
                dtype, size = _tensor(name[:80], tensor, length)
                sizes[dtype] = sizes.get(dtype, 0) + size


def _tensor(name: str, tensor: Any, file_length: int) -> tuple[str, int]:
    """The type of a tensor and its bytes. Raises PlanError."""
    try:
        begin, end = tensor["data_offsets"]
        dtype = str(tensor["dtype"])[:16]
    except (KeyError, TypeError, ValueError):
        raise PlanError(f"tensor {name!r} has no type or place") from None
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= file_length:
        raise PlanError(f"tensor {name!r} is not inside the file")
    return dtype, end - begin


@contextmanager
def _errors_of(file: Path) -> Iterator[None]:
    """Name the file in errors of its content."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from None
    except OSError as error:
        raise PlanError(f"{file}: cannot be read: {error.strerror}") from None


def _absence(file: Path) -> str:
    if file.exists():
        return "is not a file"
    is_id = _MODEL_ID.fullmatch(str(file)) and file.suffix != ".json" and not file.parent.exists()
    fetch = (
        f"; of a Hugging Face model download its config.json first: hf download {file} config.json"
    )
    return f"there is no such file{fetch if is_id else ''}"


def _json(file: Path) -> object:
    """Raises PlanError, OSError; neither names the file."""
    if not file.is_file():
        raise PlanError(_absence(file))
    if file.stat().st_size > MAX_JSON_BYTES:
        raise PlanError(f"is larger than {MAX_JSON_BYTES >> 20} MiB")
    try:
        return orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as error:
        raise PlanError(f"is not valid JSON: {error}") from None
