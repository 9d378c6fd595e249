"""Tokens and sizes of images, compared with vLLM, transformers and Pillow."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from app.inference.image_size import size_of
from app.inference.image_tokens import read_image_rule
from tests.judges import judge

pytestmark = [
    pytest.mark.slow("its judge runs where the lock has changed"),
    pytest.mark.soak,
    pytest.mark.timeout(300),
]

SIZES = (
    *((1, 1), (4, 4), (28, 28), (640, 480), (481, 641), (1024, 1024), (1540, 1541), (4000, 3000)),
    *((3000, 5000), (150, 1), (1, 190), (7000, 4500), (336, 336), (365, 364), (1456, 1457)),
)
# Family, files of the model, and the arguments of the judge's configuration.
CLIP = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
SIGLIP = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
PIXTRAL = {"model_type": "pixtral", "image_size": 1024, "patch_size": 16}
MISTRAL = {"model_type": "pixtral", "image_size": 1540, "patch_size": 14}
SMALL = {"min_pixels": 4 * 28 * 28, "max_pixels": 256 * 28 * 28}
LARGE = {"patch_size": 16, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}
TILES = {"size": {"longest_edge": 4 * 364}, "max_image_size": {"longest_edge": 364}}
BIG_TILES = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
FULL = {"vision_feature_select_strategy": "full"}
CASES: tuple[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]], ...] = (
    ("qwen2_vl", {"vision_config": {}}, {}, {}),
    ("qwen2_vl", {"vision_config": {}}, SMALL, SMALL),
    ("qwen2_vl", {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16}}, LARGE, LARGE),
    ("idefics3", {"vision_config": {}}, TILES, TILES),
    ("idefics3", {"model_type": "smolvlm", "vision_config": {}}, BIG_TILES, BIG_TILES),
    ("idefics3", {"vision_config": {}}, TILES | {"do_image_splitting": False}, {}),
    ("llava", {"vision_config": CLIP}, {}, {"vision_config": CLIP}),
    ("llava", {"vision_config": SIGLIP} | FULL, {}, {"vision_config": SIGLIP} | FULL),
    ("llava", {"vision_config": PIXTRAL}, {}, {"vision_config": PIXTRAL}),
    ("mistral3", {"vision_config": MISTRAL}, {}, {"vision_config": MISTRAL}),
)  # fmt: skip


@pytest.fixture(scope="module")
def judged() -> dict[str, Any]:
    cases = [
        {"family": family, "config": given or steps, "sizes": SIZES}
        for family, _, steps, given in CASES
    ]
    answer = judge(Path(__file__).with_name("count_by_vllm.py"), json.dumps(cases))
    found: dict[str, Any] = json.loads(answer)
    return found


@pytest.mark.parametrize("place", range(len(CASES)))
def test_the_tokens_of_an_image_are_those_of_vllm(
    judged: dict[str, Any], tmp_path: Path, place: int
) -> None:
    family, config, steps, _ = CASES[place]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family} | config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(steps))
    each = 10_000  # a tile has more tokens than the text around the tiles
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_seq_len": each}))
    rule = read_image_rule(tmp_path, {}, None, Tokenizer(models.BPE()))
    assert rule is not None
    added = [rule.added(*size) + 1 for size in SIZES]
    expected = judged["counts"][place]
    if family == "idefics3":
        expected = [each * tiles for tiles in expected]
    assert dict(zip(SIZES, added, strict=True)) == dict(zip(SIZES, expected, strict=True))


def test_sizes_are_those_of_pillow(judged: dict[str, Any]) -> None:
    assert len(judged["images"]) == 21
    for uri, width, height in judged["images"]:
        assert size_of(uri) == (width, height), uri[:60]
