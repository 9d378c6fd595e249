"""Counts tokens of images as vLLM and transformers do: cases as JSON on stdin, counts on stdout.

`counts` has the numbers by case, `images` has data URIs of images that Pillow wrote, and their sizes.

Runs in Triton's environment. A case has a family, arguments of its configuration, and sizes. The
arithmetic of Pixtral is in a file that imports torchvision, which a CPU's environment lacks, and counts
without it: an empty module takes its place.
"""

import base64
import io
import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from PIL import Image
from transformers import LlavaConfig, Mistral3Config
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import is_torchvision_available

if not is_torchvision_available():
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    sys.modules["torchvision.transforms.v2"].functional = None  # type: ignore[attr-defined]

from vllm.model_executor.models.vision import (
    get_num_selected_vision_tokens,
    get_vision_encoder_info,
)


def count(case: dict[str, Any], width: int, height: int) -> int:
    """Tokens in the place of an image; of Idefics3, the tiles."""
    family, given = case["family"], case["config"]
    if family == "qwen2_vl":
        processor = Qwen2VLImageProcessorPil(**given)
        patches = processor.get_number_of_image_patches(height, width, {})
        return int(patches // processor.merge_size**2)
    if family == "idefics3":
        tiles, _, _ = Idefics3ImageProcessorPil(**given).get_number_of_image_patches(height, width)
        return max(1, int(tiles))
    config = (Mistral3Config if family == "mistral3" else LlavaConfig)(**given)
    info = get_vision_encoder_info(config)
    if config.vision_config.model_type == "pixtral":
        columns, rows = info.get_patch_grid_size(image_width=width, image_height=height)
        return int((columns + 1) * rows)
    tokens = info.get_num_image_tokens(image_width=width, image_height=height)
    return int(get_num_selected_vision_tokens(tokens, config.vision_feature_select_strategy))


def images() -> list[tuple[str, int, int]]:
    """A data URI, width and height of an image of each form."""
    made = []
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a viewer, and not by the engine
    for format_, options in (
        ("png", {}),
        ("gif", {}),
        ("jpeg", {"exif": exif, "icc_profile": bytes(100_000), "comment": b"\xff\xc0 no frame"}),
        ("jpeg", {"progressive": True}),
        ("webp", {}),
        ("webp", {"lossless": True}),
        ("webp", {"exif": exif}),
    ):
        for size in ((1, 1), (301, 77), (5000, 3)):
            file = io.BytesIO()
            Image.new("RGB", size, "red").save(file, format_, **options)
            with Image.open(file) as image:
                width, height = image.convert("RGB").size
            encoded = base64.b64encode(file.getvalue()).decode()
            made.append((f"data:image/{format_};base64,{encoded}", width, height))
    return made


def main() -> None:
    cases = json.load(sys.stdin)
    counts = [[count(case, *size) for size in case["sizes"]] for case in cases]
    json.dump({"counts": counts, "images": images()}, sys.stdout)


main()
