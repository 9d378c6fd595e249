"""Doubles its input."""

from typing import Any

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Entry points of Triton's Python backend."""

    def execute(self, requests: list[Any]) -> list[Any]:
        responses = []
        for request in requests:
            number = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", 2 * number)]))
        return responses
