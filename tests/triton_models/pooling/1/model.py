"""A scripted stand-in for an embeddings model or a cross encoder, behind the vLLM backend's tensors.

The numbers are pure functions of a request (pooled.py). A token is a word. With `"convert": "classify"` in
its model.json the model computes scores, otherwise vectors.

One directive anywhere in a text is for tests:

    {{delay_ms=X}}    answer X milliseconds later
    {{refuse}}        refuse the request with INVALID_ARG
    {{fail}}          fail with INTERNAL
    {{lost}}          fail with UNAVAILABLE, as the vLLM backend does when its engine died
    {{nan}}           the first number is none

Generations are refused, as by the vLLM backend. A request with the input `cancel_request_id` cancels the one
whose id it names, also if that one comes later.
"""

import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from cancellations import Cancellations
from pooled import compute

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_DIRECTIVE = re.compile(r"\{\{(\w+)(?:=(\d+))?\}\}")
CANCELLED = "CANCELLED: the request was cancelled"
_ERRORS = {
    "refuse": "INVALID_ARG: refused by its directive",
    "fail": "INTERNAL: failed by its directive",
    "lost": "UNAVAILABLE: the engine died",
}


class TritonPythonModel:
    """Entry points of Triton's Python backend."""

    def initialize(self, _args: dict[str, str]) -> None:
        settings = json.loads((Path(pb_utils.get_model_dir()) / "model.json").read_text())
        self.task = "score" if settings.get("convert") == "classify" else "embed"
        self.waiting: dict[str, threading.Timer] = {}
        self.cancellations = Cancellations()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            inputs = {tensor.name(): tensor.as_numpy().flat[0] for tensor in request.inputs()}
            if "cancel_request_id" in inputs:
                self.cancel(inputs["cancel_request_id"].decode())
                sender.send(flags=FINAL)
            elif "pooling_request" not in inputs:
                fail(sender, "INVALID_ARG: this model generates no text")
            else:
                self.run(request.request_id(), sender, json.loads(inputs["pooling_request"]))

    def run(self, request_id: str, sender: Any, request: dict[str, Any]) -> None:
        content, parameters = request["input"], request["parameters"]
        text = content if isinstance(content, str) else " ".join(map(str, content))
        found = _DIRECTIVE.search(text)
        name, value = found.groups() if found else ("", None)
        if self.cancellations.take(request_id):
            fail(sender, CANCELLED)
        elif parameters["task"] != self.task:
            fail(sender, f"INVALID_ARG: task: this model computes no {parameters['task']}")
        elif name in _ERRORS:
            fail(sender, _ERRORS[name])
        else:
            numbers = np.array(compute(content, parameters))
            if name == "nan":
                numbers[0] = np.nan
            self.answer(request_id, sender, numbers, len(text.split()), int(value or 0))

    def answer(
        self, request_id: str, sender: Any, numbers: np.ndarray, words: int, delay: int
    ) -> None:
        response = pb_utils.InferenceResponse(
            output_tensors=[
                pb_utils.Tensor("vector", numbers.astype(np.float32)),
                pb_utils.Tensor("finish_reason", np.array([b"stop"], dtype=np.object_)),
                pb_utils.Tensor("num_input_tokens", np.array([words], dtype=np.uint32)),
            ]
        )
        if delay == 0:
            sender.send(response, flags=FINAL)
            return

        def send() -> None:
            if self.waiting.pop(request_id, None) is not None:
                self.cancellations.end(request_id)
                sender.send(response, flags=FINAL)

        timer = threading.Timer(delay / 1000, send)
        timer.daemon = True
        timer.sender = sender  # type: ignore[attr-defined]
        self.waiting[request_id] = timer
        timer.start()

    def cancel(self, request_id: str) -> None:
        if (timer := self.waiting.pop(request_id, None)) is not None:
            timer.cancel()
            self.cancellations.end(request_id)
            fail(timer.sender, CANCELLED)  # type: ignore[attr-defined]
        else:
            self.cancellations.remember(request_id)


def fail(sender: Any, message: str) -> None:
    code = getattr(pb_utils.TritonError, message.partition(":")[0])
    error = pb_utils.TritonError(message, code)
    sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
