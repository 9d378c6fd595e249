"""Triton backend for current vLLM, input- and output-compatible with NVIDIA's vLLM backend.

Loaded by Triton's Python backend for every model whose config.pbtxt has `backend: "vllm"`; the
engine's arguments are read from the model's `model.json`. The same model folder works under
NVIDIA's container. Its differences on purpose:

- A request that is wrong is refused with INVALID_ARG and a message that names the parameter;
  an error never carries a text_output.
- prompt tokens + max_tokens beyond the model's length are refused instead of cut.
- Sampling parameters that a request leaves open have the values of the model's
  generation_config.json, except its length; `"generation_config": "vllm"` in model.json turns that off.
- A dead engine always ends its requests with UNAVAILABLE and makes the model not ready.
- A request with the input `cancel_request_id` generates nothing: it cancels the request whose id
  it names, also if that one comes up to 30 s later (cancellations.py). Cancelling the gRPC call works too, but races with the responses in Triton 2.51 and
  crashes the server about once in some thousand times.
- `prompt_token_ids`, if given, is the prompt as the engine reads it; `text_input` is only echoed.
- With `return_prompt_logprobs` and the sampling parameter prompt_logprobs, the first response has the
  log probabilities of the prompt's tokens as `prompt_logprobs`, in the format of `logprobs`; the first
  token has null.
- With n > 1 every response of a stream has all n outputs, the unchanged ones empty.
- The parameters ENABLE_VLLM_HEALTH_CHECK and REPORT_CUSTOM_METRICS in config.pbtxt have no effect:
  the model is always unloaded after the engine's death, and always publishes metrics.

Continuation. With `return_token_ids` each response has the ids of its new output tokens as
`token_ids`. With these ids a later request continues a generation that was lost:

- `resume_token_ids` has the ids of all output tokens so far, `resume_text` the text that the client
  has received of them. All other inputs are those of the lost request: max_tokens and min_tokens
  count the resumed tokens.
- The responses have only what is new, in text, token_ids and num_output_tokens; num_input_tokens is
  the length of the original prompt. The prompt is never echoed. When the resumed tokens already end
  the generation, the answer is the rest of its text and the finish reason, without the engine.
- Text, stop strings and characters of several tokens come out as in the undisturbed run. Greedy
  output is the same as far as the engine's kernels for prompt and output agree: measured on the CPU
  in float32 always, in bfloat16 except where logits are equal or neighbours.
- A request that cannot be continued is refused with INVALID_ARG and a message that begins
  `resume_token_ids`; the client then starts over. The reasons:

    ids outside the vocabulary, more than max_tokens, or behind the end of the output
    a resume_text with which the text of the ids does not begin
    n above 1, image
    logprobs, logprob_token_ids, prompt_logprobs, prompt_logprob_token_ids
    structured_outputs, bad_words, presence_penalty, frequency_penalty (0 has no effect)
    seed with a temperature above 0
    thinking_token_budget, repetition_detection, extra_args, trace_decode_token_ids
    an engine with logits_processors or watermark_config in model.json

  repetition_penalty does not prevent it: it treats prompt and output alike.

Pooling. A model with `"runner": "pooling"` in its model.json computes vectors of texts, or scores of documents,
and refuses generations; a refusal still runs one token, so that health checks by generations work. The input
`pooling_request` is JSON, `{"input": ..., "parameters": {"task": ..., ...}}`:

- task `embed`: `input` is a text or its token ids; `dimensions`, `normalize` (false: as pooled), `truncate`
- task `score`: `input` is a query and its documents, with a number for each; `raw` (true: without the activation), `truncate`

The one response has the numbers as `vector`, num_input_tokens and finish_reason.

Sessions. A request with the input `session_v1` is a message of an engine session, in which one call
has many generations: docs/sessions.md.

This module imports nothing heavy: Triton also loads it in a short-lived process that only
completes the model's configuration.
"""

import atexit
import json
import locale
import os
from typing import Any

import triton_python_backend_utils as pb_utils

# name, type, dims; all but the first are optional.
INPUTS = (
    ("text_input", "TYPE_STRING", [1]),
    ("image", "TYPE_STRING", [-1]),
    ("stream", "TYPE_BOOL", [1]),
    ("sampling_parameters", "TYPE_STRING", [1]),
    ("exclude_input_in_output", "TYPE_BOOL", [1]),
    ("return_finish_reason", "TYPE_BOOL", [1]),
    ("return_cumulative_logprob", "TYPE_BOOL", [1]),
    ("return_logprobs", "TYPE_BOOL", [1]),
    ("return_prompt_logprobs", "TYPE_BOOL", [1]),
    ("return_num_input_tokens", "TYPE_BOOL", [1]),
    ("return_num_output_tokens", "TYPE_BOOL", [1]),
    ("embedding_request", "TYPE_STRING", [1]),
    ("cancel_request_id", "TYPE_STRING", [1]),
    ("return_token_ids", "TYPE_BOOL", [1]),
    ("resume_token_ids", "TYPE_INT32", [-1]),
    ("resume_text", "TYPE_STRING", [1]),
    ("prompt_token_ids", "TYPE_INT32", [-1]),
    ("pooling_request", "TYPE_STRING", [1]),
    ("session_v1", "TYPE_STRING", [1]),
    ("session_commands", "TYPE_STRING", [-1]),
)
OUTPUTS = (
    ("text_output", "TYPE_STRING", [-1]),
    ("finish_reason", "TYPE_STRING", [-1]),
    ("cumulative_logprob", "TYPE_FP32", [-1]),
    ("logprobs", "TYPE_STRING", [-1]),
    ("prompt_logprobs", "TYPE_STRING", [-1]),
    ("num_input_tokens", "TYPE_UINT32", [1]),
    ("num_output_tokens", "TYPE_UINT32", [-1]),
    ("token_ids", "TYPE_INT32", [-1]),
    ("vector", "TYPE_FP32", [-1]),
    ("session_slots", "TYPE_INT32", [-1]),
    ("session_text_lengths", "TYPE_UINT32", [-1]),
    ("session_events", "TYPE_STRING", [-1]),
)


class TritonPythonModel:
    """Entry points of Triton's Python backend; the work is done by a GenerationServer."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        given = config.as_dict()
        inputs = {tensor["name"] for tensor in given["input"]}
        outputs = {tensor["name"] for tensor in given["output"]}
        for name, data_type, dims in INPUTS:
            if name not in inputs:
                tensor = {"name": name, "data_type": data_type, "dims": dims}
                config.add_input(tensor | {"optional": name != "text_input"})
        for name, data_type, dims in OUTPUTS:
            if name not in outputs:
                config.add_output({"name": name, "data_type": data_type, "dims": dims})
        # One request has many responses, and vLLM does the batching.
        config.set_model_transaction_policy({"decoupled": True})
        config.set_max_batch_size(0)
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Blocks until the engine can serve; raises what keeps it from starting."""
        # Triton's interpreter is in the C locale in any environment, and torch and
        # transformers read UTF-8 files in the locale's encoding: before their import.
        locale.setlocale(locale.LC_ALL, "C.UTF-8")
        from engine_host import EngineHost, pin_gpus
        from generation_server import GenerationServer

        config = json.loads(args["model_config"])
        parameters = {
            key: value["string_value"] for key, value in config.get("parameters", {}).items()
        }
        pin_gpus(args["model_instance_kind"], args["model_instance_device_id"], parameters)
        self.host = EngineHost(pb_utils.get_model_dir())
        self.server = GenerationServer(self.host, args["model_name"], args["model_version"])

    def execute(self, requests: list[Any]) -> None:
        self.host.server_death.ask()
        for request in requests:
            self.server.submit(request)

    def finalize(self) -> None:
        self.server.close()
        self.host.close()
        # Python's own end takes seconds with torch loaded, and destroys Triton's objects after
        # what they need, which ends in a segmentation fault: skip it.
        atexit.register(os._exit, 0)
