"""Tensors and errors, as Triton's Python backend makes them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def strings(name: str, values: list[str]) -> Any:
    encoded = [value.encode() for value in values]
    return pb_utils.Tensor(name, np.array(encoded, dtype=np.object_))


def numbers(name: str, values: Sequence[float], dtype: type) -> Any:
    return pb_utils.Tensor(name, np.array(values, dtype=dtype))


def send_error(sender: Any, message: str) -> None:
    """End a request with an error; `message` begins with the name of its code.

    A stream's errors arrive as text alone: asked for status codes, Triton 2.51 crashes under load.
    """
    code = getattr(pb_utils.TritonError, message.partition(":")[0])
    error = pb_utils.TritonError(message, code)
    sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
