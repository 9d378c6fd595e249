"""Tokens of images by a model's files. `tests/e2e/test_image_tokens.py` compares them with vLLM."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from app.inference.image_size import size_of
from app.inference.image_tokens import ImageRule, count_images, read_image_rule
from tests.images import RED, data_uri, png

CLIP = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
NO_PATCHES = {"model_type": "pixtral", "image_size": 1540, "patch_size": 0}
LLAVA: dict[str, Any] = {"model_type": "llava", "vision_config": CLIP}
QWEN: dict[str, Any] = {"model_type": "qwen2_vl", "vision_config": {}}
GEMMA: dict[str, Any] = {"model_type": "gemma3", "vision_config": {}}
OTHER: dict[str, Any] = {"model_type": "other", "vision_config": {}}


def read(
    directory: Path,
    config: dict[str, Any],
    processor: dict[str, Any] | None = None,
    steps: dict[str, Any] | None = None,
    *,
    engine: dict[str, Any] | None = None,
    declared: object = None,
) -> ImageRule | None:
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "processor_config.json").write_text(json.dumps(processor or {}))
    (directory / "preprocessor_config.json").write_text(json.dumps(steps or {}))
    return read_image_rule(directory, engine or {}, declared, Tokenizer(models.BPE()))


@pytest.mark.parametrize(
    ("config", "processor", "expected"),
    [
        (LLAVA, {}, 576),
        (QWEN, {}, 17 * 23),
        (GEMMA, {}, 256 + 4),
        (GEMMA, {"image_seq_length": 64}, 64 + 4),
        (OTHER, {"image_seq_length": 144}, 144),
        (OTHER, {"image_seq_len": 81}, 81),
    ],
)
def test_an_image_has_the_tokens_of_its_family(
    tmp_path: Path, config: dict[str, Any], processor: dict[str, Any], expected: int
) -> None:
    rule = read(tmp_path, config, processor)
    assert rule is not None
    assert rule.added(640, 480) + 1 == expected
    assert count_images(rule, [data_uri(png(RED, 640, 480))] * 3) == 3 * (expected - 1)


def test_bounds_of_pixels_may_be_arguments_of_the_engine(tmp_path: Path) -> None:
    """They pass before the processor's."""
    nested = {"image_processor": {"max_pixels": 101 * 28 * 28}}
    engine = {"mm_processor_kwargs": {"max_pixels": 5 * 28 * 28}}
    for steps, arguments, tokens in (({}, {}, 16_384), (nested, {}, 100), (nested, engine, 4)):
        rule = read(tmp_path, QWEN, steps, {"max_pixels": 12_845_056}, engine=arguments)
        assert rule is not None
        assert rule.added(5_000, 5_000) + 1 == pytest.approx(tokens, rel=0.02)


def test_an_operator_declares_the_number(tmp_path: Path) -> None:
    rule = read(tmp_path, LLAVA, declared=100)
    assert rule is not None
    assert rule.added(640, 480) + 1 == 100
    for wrong in (0, -1, "9", True, 1.5):
        with pytest.raises(ValueError, match="image_tokens"):
            read(tmp_path, LLAVA, declared=wrong)


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ({"model_type": "llava"}, {}),
        ({"model_type": "llava", "vision_config": {}}, {}),
        ({"model_type": "llava", "vision_config": CLIP | {"model_type": "own"}}, {}),
        ({"model_type": "llava", "vision_config": CLIP | {"patch_size": 0}}, {}),
        ({"model_type": "mistral3", "vision_config": NO_PATCHES}, {}),
        (QWEN, {"max_pixels": -1}),
        (OTHER, {}),
        (GEMMA, {"do_pan_and_scan": True}),
        (QWEN, {"size": [1]}),
        ({"model_type": ["llava"], "vision_config": CLIP}, {}),
    ],
)
def test_other_files_leave_the_number_unknown(
    tmp_path: Path, config: dict[str, Any], steps: dict[str, Any]
) -> None:
    assert read(tmp_path, config, {}, steps) is None


def jpeg(segments: int) -> bytes:
    """A JPEG's first bytes: comments, then a frame of 640 x 480 pixels."""
    frame = b"\xff\xc0\x00\x11\x08" + (480).to_bytes(2, "big") + (640).to_bytes(2, "big")
    return b"\xff\xd8" + b"\xff\xfe\x00\x03x" * segments + frame


def gif(screen: int, frame: int, before: bytes = b"", colours: int = 0x80) -> bytes:
    """A GIF of squares, up to the size of its first frame."""

    def twice(edge: int) -> bytes:
        return edge.to_bytes(2, "little") * 2

    table = bytes(6) if colours & 0x80 else b""
    head = b"GIF89a" + twice(screen) + bytes([colours, 0, 0]) + table
    return head + before + b"," + twice(0) + twice(frame)


COMMENT = b"!\xfe\x02ab\x01c\x00"


@pytest.mark.parametrize(
    ("content", "kind", "size"),
    [
        (gif(9, 9), "gif", (9, 9)),
        (gif(9, 5_000, COMMENT * 3), "gif", (5_000, 5_000)),
        (gif(5_000, 9, colours=0), "gif", (5_000, 5_000)),
        (gif(9, 9, COMMENT)[:-1], "gif", None),
        (gif(9, 9, COMMENT * 5_000), "gif", None),
        (gif(9, 9, b"!\xfe" + b"\x01c" * 5_000 + b"\x00"), "gif", None),
        (gif(9, 9, b"x"), "gif", None),
        (png(RED, 7, 3), "png", (7, 3)),
        (png(RED, 7, 3)[:23], "png", None),
        (b"\x89PNG\r\n\x1a\nbroken", "png", None),
        (png(RED)[:16] + bytes(8), "png", None),
        (jpeg(100), "jpeg", (640, 480)),
        (jpeg(100)[:-1], "jpeg", None),
        (jpeg(50_000), "jpeg", None),
        (b"\xff" * 1_000_000, "jpeg", None),
        (b"RIFF", "webp", None),
        (b"", "gif", None),
    ],
)
def test_a_size_is_read_within_bounds(
    content: bytes, kind: str, size: tuple[int, int] | None
) -> None:
    assert size_of(data_uri(content, f"image/{kind}")) == size


def test_an_image_without_a_size_counts_as_a_large_one(tmp_path: Path) -> None:
    rule = read(tmp_path, QWEN)
    assert rule is not None
    broken = data_uri(base64.b64decode("/9j/"), "image/jpeg")
    assert count_images(rule, [broken]) == rule.added(4_096, 4_096) > 1_000
