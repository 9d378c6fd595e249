"""The messages of a session with a model (docs/sessions.md)."""

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import orjson
from tritonclient.grpc import service_pb2 as pb

from app.inference.triton_messages import (
    ID_BYTES,
    Delta,
    EarlierText,
    bytes_element,
    input_tensor,
    read_logprobs,
    without_prompt_ids,
)

SESSION_INPUT = "session_v1"
_INPUTS = [input_tensor("text_input", "BYTES"), input_tensor(SESSION_INPUT, "BYTES")]
_EMPTY = bytes_element(b"")

Command = dict[str, Any]


class SlotOutput(NamedTuple):
    """A slot's part of a response; `error` ends the slot, as does the delta's finish reason."""

    slot: int
    delta: Delta
    error: str | None


def build_submission(
    slot: int,
    prompt: str,
    parameters: dict[str, Any],
    *,
    is_live: bool,
    returns_ids: bool,
    earlier: EarlierText | None,
) -> Command:
    parameters, prompt_ids = without_prompt_ids(parameters)
    members: Command = {"slot": slot, "prompt": prompt, "parameters": parameters}
    if prompt_ids is not None:
        members["prompt_token_ids"] = prompt_ids
    if is_live:
        members["live"] = True
    if returns_ids:
        members["token_ids"] = True
    if earlier is not None:
        ids = memoryview(earlier.token_ids).cast("i").tolist()
        members["resume"] = {"token_ids": ids, "text": earlier.text}
    return {"submit": members}


def encode_command(command: Command) -> bytes:
    """An element of the tensor of commands. Raises TypeError if JSON cannot hold it."""
    return bytes_element(orjson.dumps(command))


def build_message(
    model: str, session_id: str, message_id: str, commands: Sequence[bytes]
) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(
        id=message_id,
        model_name=model,
        inputs=[*_INPUTS, input_tensor("session_commands", "BYTES", len(commands))],
        raw_input_contents=[_EMPTY, bytes_element(session_id.encode()), b"".join(commands)],
    )


def read_step(
    response: pb.ModelInferResponse, returns_ids: Callable[[int], bool]
) -> list[SlotOutput]:
    """Read what a response has for each slot; NUL, which PostgreSQL cannot store, becomes U+FFFD.

    Raises ValueError, KeyError, TypeError or struct.error if the tensors do not fit one another.
    """
    tensors = {
        output.name: content
        for output, content in zip(response.outputs, response.raw_output_contents, strict=True)
    }
    slots = memoryview(tensors["session_slots"]).cast("i")
    lengths = memoryview(tensors["session_text_lengths"]).cast("I")
    counts = memoryview(tensors["num_output_tokens"]).cast("I")
    (text,) = _texts(tensors["text_output"])
    text = text.replace("\x00", "\ufffd")
    token_ids = tensors.get("token_ids", b"")
    logprobs = _texts(tensors["logprobs"]) if "logprobs" in tensors else [""] * len(slots)
    events = _events(tensors.get("session_events", b""))
    prompts = _texts(tensors.get("prompt_logprobs", b"")) or [""] * len(slots)
    version = int(response.model_version) if response.model_version else None
    outputs = []
    at = ids_at = 0
    parts = zip(slots, lengths, counts, logprobs, prompts, strict=True)
    for slot, length, count, encoded, of_prompt in parts:
        event = events.pop(slot, _NO_EVENT)
        ids = None
        if returns_ids(slot):
            ids = token_ids[ids_at : ids_at + count * ID_BYTES]
            ids_at += count * ID_BYTES
        delta = Delta(
            text[at : at + length],
            event.get("finish_reason"),
            event.get("prompt_tokens", 0),
            count,
            read_logprobs(encoded),
            version,
            ids,
            read_logprobs(of_prompt),
        )
        at += length
        outputs.append(SlotOutput(slot, delta, event.get("error")))
    if at != len(text) or ids_at != len(token_ids) or events:
        raise ValueError("lengths and contents of its tensors differ")
    return outputs


_NO_EVENT: dict[str, Any] = {}


def _events(content: bytes) -> dict[int, dict[str, Any]]:
    events = map(orjson.loads, _elements(content))
    return {event["slot"]: event for event in events}


def _texts(content: bytes) -> list[str]:
    return [element.decode("utf-8", errors="replace") for element in _elements(content)]


def _elements(content: bytes) -> Iterator[bytes]:
    """The elements of a BYTES tensor."""
    at = 0
    while at < len(content):
        (length,) = struct.unpack_from("<I", content, at)
        yield content[at + 4 : at + 4 + length]
        at += 4 + length
