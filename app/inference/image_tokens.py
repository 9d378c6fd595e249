"""Tokens of images by a model's own files, as vLLM counts them in a prompt (docs/vision.md).

A template writes one token for each image, which the engine replaces. Each rule has the number of
tokens that this adds, for an image of a width and a height.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from app.inference import tokenizer_files as files
from app.inference.image_size import size_of

_UNKNOWN = (4_096, 4_096)  # an image whose bytes have no size counts as a large one
_MAX_EDGE = 4_096  # of images that Idefics3 cuts into tiles


class ImageRule(Protocol):
    def added(self, width: int, height: int) -> int: ...


@dataclass(slots=True, frozen=True)
class Fixed:
    """A number of its own: LLaVA, Gemma 3."""

    tokens: int

    def added(self, _width: int, _height: int) -> int:
        return self.tokens


@dataclass(slots=True, frozen=True)
class Resized:
    """Squares of `factor` pixels, after a resize to a range of pixels: Qwen2-VL and later."""

    factor: int
    min_pixels: int
    max_pixels: int

    def added(self, width: int, height: int) -> int:
        columns, rows = round(width / self.factor), round(height / self.factor)
        pixels = columns * rows * self.factor**2
        if pixels > self.max_pixels:
            scale = math.sqrt(width * height / self.max_pixels)
            columns = max(1, int(width / scale / self.factor))
            rows = max(1, int(height / scale / self.factor))
        elif pixels < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (width * height))
            columns = math.ceil(width * scale / self.factor)
            rows = math.ceil(height * scale / self.factor)
        return columns * rows - 1


@dataclass(slots=True, frozen=True)
class Rows:
    """Rows of patches, each with a token at its end: Pixtral, Mistral 3."""

    patch: int
    longest_edge: int

    def added(self, width: int, height: int) -> int:
        ratio = max(width / self.longest_edge, height / self.longest_edge)
        if ratio > 1:
            width, height = max(1, int(width / ratio)), max(1, int(height / ratio))
        columns, rows = (width - 1) // self.patch + 1, (height - 1) // self.patch + 1
        return (columns + 1) * rows - 1


@dataclass(slots=True, frozen=True)
class Tiles:
    """Tiles of one size, and the whole image behind them: Idefics3, SmolVLM."""

    tokens: int  # of a tile
    tile: int  # pixels of its edge
    longest_edge: int
    splits: bool
    count: Callable[[str], int]  # tokens of the text around the tiles

    def added(self, width: int, height: int) -> int:
        columns, rows = self._grid(width, height) if self.splits else (0, 0)
        return self.count(_around(columns, rows)) + (columns * rows + 1) * self.tokens - 1

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        ratio, edge = width / height, self.longest_edge
        if width >= height:
            width, height = edge, int(edge / ratio)
            height += height % 2
        else:
            width, height = int(edge * ratio), edge
            width += width % 2
        width, height = _within(max(width, 1), max(height, 1))
        if width <= self.tile and height <= self.tile:
            return 0, 0
        ratio = width / height
        if width >= height:
            width = math.ceil(width / self.tile) * self.tile
            height = int(width / ratio)
        else:
            height = math.ceil(height / self.tile) * self.tile
            width = int(height * ratio)
        return math.ceil(width / self.tile), math.ceil(height / self.tile)


def _within(width: int, height: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height and width > _MAX_EDGE:
        return _MAX_EDGE, max(1, int(_MAX_EDGE / ratio))
    if height > width and height > _MAX_EDGE:
        return max(1, int(_MAX_EDGE * ratio)), _MAX_EDGE
    return width, height


def _around(columns: int, rows: int) -> str:
    """The text of an image without the tokens of its tiles."""
    fake = "<fake_token_around_image>"
    lines = [
        "".join(f"{fake}<row_{row + 1}_col_{column + 1}>" for column in range(columns)) + "\n"
        for row in range(rows)
    ]
    return "".join(lines) + ("\n" if lines else "") + f"{fake}<global-img>{fake}"


def count_images(rule: ImageRule, uris: Iterable[str]) -> int:
    """Tokens that images add to a prompt."""
    return sum(max(0, rule.added(*(size_of(uri) or _UNKNOWN))) for uri in uris)


def read_image_rule(
    weights: Path, engine: Mapping[str, Any], declared: object, tokenizer: Tokenizer | None
) -> ImageRule | None:
    """The rule of a model by its files, or the number that its operator declares; None: unknown.

    Raises ValueError for a declared number that is none.
    """
    if declared is not None:
        if not isinstance(declared, int) or isinstance(declared, bool) or declared < 1:
            raise ValueError("image_tokens must be a number of 1 or more")
        return Fixed(declared - 1)
    config = files.read_json(weights / "config.json")
    if not isinstance(config.get("vision_config"), dict):
        return None
    processor = files.read_json(weights / "processor_config.json")
    nested = processor.get("image_processor")
    steps = files.read_json(weights / "preprocessor_config.json")
    steps |= nested if isinstance(nested, dict) else {}
    given = engine.get("mm_processor_kwargs")
    steps |= given if isinstance(given, dict) else {}
    try:
        read: _Reader = _READERS.get(str(config.get("model_type")), _by_length)
        rule = read(config, processor, steps, tokenizer)
        if rule is not None:
            rule.added(640, 480)  # sizes of 0 in a file fail here, and not in a request
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return None  # files of another form than those of the public models
    return rule


_Json = Mapping[str, Any]
_Reader = Callable[[_Json, _Json, _Json, Tokenizer | None], ImageRule | None]


def _llava(config: _Json, _processor: _Json, _steps: _Json, _: Tokenizer | None) -> ImageRule:
    vision = config["vision_config"]
    kind, patch = vision["model_type"], int(vision["patch_size"])
    if kind == "pixtral":
        return Rows(patch * int(config.get("spatial_merge_size", 1)), int(vision["image_size"]))
    if kind not in ("clip_vision_model", "siglip_vision_model"):
        raise ValueError(kind)
    patches = (int(vision["image_size"]) // patch) ** 2 + (kind == "clip_vision_model")
    is_full = config.get("vision_feature_select_strategy", "default") == "full"
    return Fixed(patches - (not is_full) - 1)


def _mistral3(config: _Json, processor: _Json, steps: _Json, tokenizer: Tokenizer | None) -> Any:
    return _llava({"spatial_merge_size": 2} | dict(config), processor, steps, tokenizer)


def _qwen(config: _Json, _processor: _Json, steps: _Json, _: Tokenizer | None) -> ImageRule:
    vision = config["vision_config"]
    patch = int(steps.get("patch_size") or vision.get("patch_size", 14))
    merge = int(steps.get("merge_size") or vision.get("spatial_merge_size", 2))
    size = steps.get("size") or {}
    low = steps.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    high = steps.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    return Resized(patch * merge, int(low), int(high))


def _gemma3(_config: _Json, processor: _Json, steps: _Json, _: Tokenizer | None) -> Any:
    if steps.get("do_pan_and_scan"):
        return None
    # Around the image: its end, and two empty lines, which may join with those of the text.
    return Fixed(int(processor.get("image_seq_length", 256)) + 3)


def _idefics3(_config: _Json, processor: _Json, steps: _Json, tokenizer: Tokenizer | None) -> Any:
    if tokenizer is None:
        return None

    @lru_cache(maxsize=256)
    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return Tiles(
        tokens=int(processor.get("image_seq_len", 169)),
        tile=int((steps.get("max_image_size") or {"longest_edge": 364})["longest_edge"]),
        longest_edge=int((steps.get("size") or {"longest_edge": 4 * 364})["longest_edge"]),
        splits=bool(steps.get("do_image_splitting", True)),
        count=count,
    )


def _by_length(_config: _Json, processor: _Json, _steps: _Json, _: Tokenizer | None) -> Any:
    length = processor.get("image_seq_length") or processor.get("image_seq_len")
    return Fixed(int(length) - 1) if length else None


_READERS: dict[str, _Reader] = {
    "llava": _llava,
    "mistral3": _mistral3,
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
} | dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), _qwen)
