"""The option `--engine-option NAME=VALUE` of commands that write a model.json."""

import argparse
from typing import Any

from app.inference.engine_options import parse_option

ENGINE_OPTION_HELP = (
    "an option of vLLM's engine, such as max_num_seqs=64 or enable_prefix_caching=true; repeat it for "
    "several. Lists have commas (1,2,4), objects are JSON. `launch engine-options` lists all"
)


def engine_option(text: str) -> tuple[str, Any]:
    try:
        return parse_option(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
