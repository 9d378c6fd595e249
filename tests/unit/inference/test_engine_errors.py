"""Each row of docs/engine_errors.md: what a message means."""

import re
from pathlib import Path

import pytest

from app.inference.triton_errors import (
    EngineDeadError,
    EngineUnhealthyError,
    GenerationError,
    ModelDeadError,
    ModelFailedError,
    NotTakenError,
    RefusedError,
    StreamLostError,
    UnclearError,
    to_model_error,
)

_PAGE = Path(__file__).parents[3] / "docs" / "engine_errors.md"
_STARTED = "Error generating stream: "
_LENGTH = (
    "is longer than the maximum model length of 1024. Make sure that `max_model_len` is no smaller"
)

# By a row's first cell: messages as they were received.
_DIRECT: dict[str, tuple[type[GenerationError], list[str]]] = {
    "`INVALID_ARG: ...`": (RefusedError, ["INVALID_ARG: unknown sampling parameter: x"]),
    "`UNAVAILABLE: ...`": (StreamLostError, ["UNAVAILABLE: the engine of model m died"]),
    "`INTERNAL: ...`": (
        ModelFailedError,
        [f"INTERNAL: {_STARTED}EngineCore encountered an issue."],
    ),
    "`Stub process '...' is not healthy`": (
        ModelDeadError,
        [
            "Stub process 'm_0_0' is not healthy.",
            "Failed to process the request(s) for model instance 'm_0_0', message: Stub process "
            "'m_0_0' is not healthy.",
        ],
    ),
    "`Request for unknown model`, `... is not at ready state`, `... is not ready`": (
        NotTakenError,
        [
            "Request for unknown model: 'm' is not found",
            "Request for unknown model: 'm' version 1 is not at ready state",
        ],
    ),
    "`Model is unavailable due to unhealthy vLLM engine`": (
        EngineUnhealthyError,
        ["Model is unavailable due to unhealthy vLLM engine"],
    ),
    "`vLLM engine is not healthy and model will be unloaded`": (
        EngineUnhealthyError,
        ["vLLM engine is not healthy and model will be unloaded"],
    ),
    "`Cannot create tasks after shutdown has been requested`": (
        NotTakenError,
        [
            "Failed to process the request(s) for model instance 'm_0_0', message: AssertionError: "
            "Cannot create tasks after shutdown has been requested"
        ],
    ),
    "`LoRA feature is not enabled.`": (RefusedError, ["LoRA feature is not enabled."]),
    "`LoRA NAME is not supported, we currently support ...`": (
        RefusedError,
        ["LoRA x is not supported, we currently support ['sheep', 'dog']"],
    ),
    "`unexpected inference input 'NAME' ...`, `unexpected inference output ...`": (
        RefusedError,
        [
            "[request id: 1] unexpected inference input 'text_input' for model 'onnx'",
            "unexpected inference output 'finish_reason' for model 'echo'",
        ],
    ),
    "`expected N inputs but got M inputs ...`": (
        RefusedError,
        ["[request id: 1] expected 1 inputs but got 8 inputs for model 'onnx'. Got input(s) [...]"],
    ),
    "`Request was cancelled`": (StreamLostError, ["Request was cancelled"]),
    "any other": (ModelFailedError, ["Something else.", "N/A", ""]),
}
_GENERATING: dict[str, tuple[type[GenerationError], list[str]]] = {
    "`EngineCore encountered an issue. ...`, `EngineDeadError...`": (
        EngineDeadError,
        [
            "EngineCore encountered an issue. See stack trace (above) for the root cause.",
            "EngineDeadError: EngineCore encountered an issue.",
        ],
    ),
    "`Engine loop is not running...`, `Engine loop has died`": (
        EngineDeadError,
        [
            "Engine loop is not running. Inspect the stacktrace to find the original error: "
            "RuntimeError('CUDA error').",
            "Engine loop has died",
        ],
    ),
    "`Background loop has errored already.`, `Background loop is stopped.`": (
        EngineDeadError,
        ["Background loop has errored already.", "Background loop is stopped."],
    ),
    "`Task finished unexpectedly...`": (
        EngineDeadError,
        ["Task finished unexpectedly. This should never happen! Please open an issue on GitHub."],
    ),
    "`... (parameter=NAME, value=VALUE)`": (
        RefusedError,
        [
            "Requested sample logprobs of 500, which is greater than max allowed: 20 "
            "(parameter=logprobs, value=500)",
            "allowed_token_ids is not None and empty! (parameter=allowed_token_ids, value=[])",
        ],
    ),
    "`This model's maximum context length is ...`": (
        RefusedError,
        ["This model's maximum context length is 1024 tokens. However, your prompt contains more."],
    ),
    "`The decoder prompt (length N) is longer than the maximum model length ...`": (
        RefusedError,
        [f"The decoder prompt (length 9) {_LENGTH}", f"The prompt (total length 9) {_LENGTH}"],
    ),
    "`The decoder prompt cannot be empty`": (RefusedError, ["The decoder prompt cannot be empty"]),
    "`Grammar error: ...`": (RefusedError, ["Grammar error: Invalid type: nonsense"]),
    "`Model NAME does not support 'generate' request`": (
        RefusedError,
        ["Model m does not support 'generate' request"],
    ),
    "`VLLM backend does not support 'TASK' request`": (
        RefusedError,
        ["VLLM backend does not support 'embed' request"],
    ),
    "``When streaming, `exclude_input_in_output` = False is not allowed.``": (
        RefusedError,
        ["When streaming, `exclude_input_in_output` = False is not allowed."],
    ),
    "`'NoneType' object has no attribute 'lora_name'`": (
        RefusedError,
        ["'NoneType' object has no attribute 'lora_name'"],
    ),
    "anything else, or nothing": (
        UnclearError,
        ["", "CUDA error: device-side assert triggered", "'NoneType' object is not callable",
         # A prompt that is quoted must not pass for a dead engine.
         "bad prompt 'EngineCore encountered an issue. Engine loop has died'"],
    ),
}  # fmt: skip

_ROWS = [(cell, "", *row) for cell, row in _DIRECT.items()]
_ROWS += [(cell, _STARTED, *row) for cell, row in _GENERATING.items()]


@pytest.mark.parametrize(
    ("prefix", "family", "messages"), [row[1:] for row in _ROWS], ids=[row[0][:40] for row in _ROWS]
)
def test_each_message_means_what_the_page_says(
    prefix: str, family: type[GenerationError], messages: list[str]
) -> None:
    for message in messages:
        assert type(to_model_error(prefix + message)) is family, message


def test_the_page_has_these_rows() -> None:
    text = _PAGE.read_text().partition("## Messages")[2].partition("## Dead engines")[0]
    cells = re.findall(r"^\| (.+?) \| .*\|$", text, re.MULTILINE)
    rows = [cell for cell in cells if cell != "---" and not cell.startswith(("message", "after "))]
    assert rows == [row[0] for row in _ROWS]


def test_a_refusal_names_the_remedy() -> None:
    message = "This model's maximum context length is 8 tokens."
    assert str(to_model_error(_STARTED + message)) == message
    unreadable = to_model_error(f"{_STARTED}'NoneType' object has no attribute 'lora_name'")
    assert "sampling parameters" in str(unreadable)
    assert "Triton's log" in str(unreadable)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("filling", ["(parameter=x", " (parameter=", "LoRA ", "Model x ", "'\"`("])
def test_a_long_message_is_read_in_time(filling: str) -> None:
    for prefix in ("", _STARTED, "Model ", "LoRA "):
        to_model_error(prefix + filling * 100_000)
