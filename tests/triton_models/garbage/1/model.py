"""Answers with bytes that are not UTF-8; log probabilities are not JSON."""

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


def tensor(name: str, value: bytes) -> Any:
    return pb_utils.Tensor(name, np.array([value], dtype=np.object_))


class TritonPythonModel:
    """Entry points of Triton's Python backend."""

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            wants = pb_utils.get_input_tensor_by_name(request, "return_logprobs")
            tensors = [
                tensor("text_output", b"caf\xe9 \xff\xfe\x00"),
                tensor("finish_reason", b"stop"),
                pb_utils.Tensor("num_input_tokens", np.array([1], dtype=np.uint32)),
                pb_utils.Tensor("num_output_tokens", np.array([1], dtype=np.uint32)),
            ]
            if wants is not None and wants.as_numpy()[0]:
                tensors.append(tensor("logprobs", b"[{"))
            request.get_response_sender().send(
                pb_utils.InferenceResponse(tensors),
                flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
            )
