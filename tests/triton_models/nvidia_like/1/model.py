"""The scripted model with the interface and the failures of NVIDIA's vLLM backend.

It has no input to cancel a request, and its engine is a process of its own: once that is killed, every
running and every later request fails with the message of NVIDIA's backend, and the model stays ready.

Parameters in config.pbtxt: with ENABLE_VLLM_HEALTH_CHECK it refuses later requests and unloads itself,
as theirs does; ENGINE_DEAD replaces the message of a dead engine.

`scripted.py` and the other modules beside this file are those of triton/models/scripted (see the fixture).
"""

import heapq
import json
import subprocess
import threading
from typing import Any

import scripted
import triton_python_backend_utils as pb_utils

ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
UNHEALTHY = "Model is unavailable due to unhealthy vLLM engine"
SAMPLING_UNREADABLE = "'NoneType' object has no attribute 'lora_name'"


def send_error(sender: Any, message: str) -> None:
    """Send an error as NVIDIA's backend words it: without a code, behind one prefix."""
    code, _, text = message.partition(": ")
    message = SAMPLING_UNREADABLE if code == "INVALID_ARG" else text
    error = pb_utils.TritonError(f"Error generating stream: {message}")
    sender.send(pb_utils.InferenceResponse(error=error), flags=scripted.FINAL)


scripted.send_error = send_error


class TritonPythonModel(scripted.TritonPythonModel):
    """Entry points of Triton's Python backend."""

    def initialize(self, args: dict[str, str]) -> None:
        super().initialize(args)
        config = json.loads(args["model_config"])
        self.name = config["name"]
        parameters = config.get("parameters", {})
        self.checks_health = "ENABLE_VLLM_HEALTH_CHECK" in parameters
        self.message = parameters.get("ENGINE_DEAD", {}).get("string_value", ENGINE_DEAD)
        # Named as vLLM's process, for tests that look for it; it dies with this one.
        engine = ("bash", "-c", "exec -a EngineCore sleep infinity")
        self.engine = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "--", *engine])
        self.is_engine_dead = False
        threading.Thread(target=self.watch_engine, daemon=True).start()

    def watch_engine(self) -> None:
        self.engine.wait()
        with self.changed:
            self.is_engine_dead = True
            self.heap[:] = [(0.0, number, generation) for _, number, generation in self.heap]
            heapq.heapify(self.heap)
            self.changed.notify_all()

    def execute(self, requests: list[Any]) -> None:
        if not self.is_engine_dead:
            super().execute(requests)
            return
        for request in requests:
            sender = request.get_response_sender()
            if self.checks_health:
                error = pb_utils.TritonError(UNHEALTHY, pb_utils.TritonError.UNAVAILABLE)
                sender.send(pb_utils.InferenceResponse(error=error), flags=scripted.FINAL)
                pb_utils.unload_model(self.name)
            else:
                send_error(sender, f"INTERNAL: {self.message}")

    def step(self, generation: scripted.Generation) -> bool:
        if self.is_engine_dead:
            send_error(generation.sender, f"INTERNAL: {self.message}")
            return True
        return super().step(generation)

    def finalize(self) -> None:
        super().finalize()
        self.engine.kill()
