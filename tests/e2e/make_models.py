"""Make tiny random models and adapters: `python make_models.py DIRECTORY`, with the texts as JSON on stdin.

Runs in Triton's environment, which has torch and transformers; one process imports them once for all.
DIRECTORY gets models in `models`, adapters of the model `tools` in `adapters`, and what transformers
computes with them of the texts in expected.json.
"""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def part(name: str) -> Callable[..., Any]:
    """`make` of another file in this folder, which is no place for imports (`python -I`)."""
    file = Path(__file__).with_name(f"make_{name}.py")
    make: Callable[..., Any] = runpy.run_path(str(file))["make"]
    return make


def main() -> None:
    directory, texts = Path(sys.argv[1]), json.load(sys.stdin)
    models = directory / "models"
    part("tiny_models")(models)
    part("vision_model")(models / "eye")
    expected = part("pooling_models")(models, texts)
    expected["adapters"] = part("adapters")(
        models / "tools", directory / "adapters", texts["prompt"]
    )
    (directory / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main()
