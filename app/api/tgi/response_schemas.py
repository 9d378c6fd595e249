"""Responses of Text Generation Inference: generated texts, tokens, events, headers.

https://github.com/huggingface/text-generation-inference: router/src/server.rs and
router/src/lib.rs. Members that are null or absent there are so here.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from app.api.logprobs import logprob_of
from app.api.tgi.schemas import MAX_BEST_OF, MAX_STOP_SEQUENCES, UINT64, Generation
from app.api.tgi.token_texts import TokenTexts
from app.core.ids import created_at
from app.inference.encoding import TokenizedText
from app.results.rows import ResultRow

_TOKENS_OF_PIECE = 1_000  # they have about 50 bytes each, as JSON


class TokenReader:
    """Converts the engine's log probabilities to TGI's tokens, in the response's order."""

    def __init__(self, generation: Generation) -> None:
        self._top_n = generation.given.top_n_tokens or 0
        known = generation.format
        self._special_ids = known.special_ids if known else frozenset()
        self._texts = None
        if known is not None and known.tokenizer is not None:
            self._texts = TokenTexts(known.tokenizer, generation.prompt_ids)

    def read(self, position: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        identifier, entry = sampled(position)
        text = self._texts.add(int(identifier)) if self._texts else entry["decoded_token"]
        wire: dict[str, Any] = {"token": self._token(identifier, entry, text)}
        if self._top_n:
            best = sorted(position.items(), key=lambda item: item[1]["rank"])
            wire["top_tokens"] = [
                self._token(other, one, one["decoded_token"])
                for other, one in best
                if one["rank"] <= self._top_n
            ]
        return wire

    def _token(self, identifier: str, entry: Mapping[str, Any], text: str | None) -> dict[str, Any]:
        return {
            "id": int(identifier),
            "text": text or "",
            "logprob": entry["logprob"],
            "special": int(identifier) in self._special_ids,
        }


def sampled(position: Mapping[str, Mapping[str, Any]]) -> tuple[str, Mapping[str, Any]]:
    for identifier, entry in position.items():
        if entry.get("sampled"):
            return identifier, entry
    return next(iter(position.items()))


def best_first(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """The generation with the highest cumulative log probability, then the others in their order."""
    if len(rows) == 1:
        return list(rows)
    best = max(rows, key=_total)
    return [best, *(row for row in rows if row is not best)]


def _total(row: ResultRow) -> float:
    return sum(logprob_of(sampled(position)[1]) for position in row.token_logprobs())


def finish_reason(row: ResultRow, stops: Sequence[str] | None) -> str:
    """Reason of the end. The engine has one reason for an end token and a stop text."""
    if row.finish_reason == "length":
        return "length"
    if any(row.text.endswith(stop) for stop in stops or ()):
        return "stop_sequence"
    return "eos_token"


def generation_to_wire(generation: Generation, rows: Sequence[ResultRow]) -> dict[str, Any]:
    best, *others = rows
    answer: dict[str, Any] = {"generated_text": generation.prefix + best.text}
    if generation.given.details:
        answer["details"] = _details(generation, best)
        if others:
            answer["details"]["best_of_sequences"] = [
                {"generated_text": generation.prefix + row.text} | _details(generation, row)
                for row in others
            ]
    return answer


def _details(generation: Generation, row: ResultRow) -> dict[str, Any]:
    reader = TokenReader(generation)
    read = [reader.read(position) for position in row.token_logprobs()]
    details: dict[str, Any] = {
        "finish_reason": finish_reason(row, generation.given.stop),
        "generated_tokens": row.completion_tokens,
        "seed": _seed(row),
        "prefill": [],
        "tokens": [one["token"] for one in read],
    }
    if generation.given.top_n_tokens:
        details["top_tokens"] = [one["top_tokens"] for one in read]
    return details


def _seed(row: ResultRow) -> int | None:
    """TGI's unsigned seed; null if the generation did not sample."""
    seed: int | None = orjson.loads(row.parameters).get("seed")
    return None if seed is None else seed % UINT64


def headers_of(generation: Generation, row: ResultRow, validation_seconds: float) -> dict[str, str]:
    """TGI's headers, from the result's own times: milliseconds, if known.

    `x-compute-type` is left out: a Triton server does not report its hardware.
    """
    headers = {"x-compute-characters": str(len(generation.inputs))}
    started, finished = row.started_at, row.finished_at
    if started is not None and finished is not None:
        queued = max(0.0, (started - created_at(row.id)).total_seconds())
        running = (finished - started).total_seconds()
        total = validation_seconds + queued + running
        headers["x-compute-time"] = f"{total:.6f}"  # the one in seconds
        times = {
            "x-total-time": total,
            "x-validation-time": validation_seconds,
            "x-queue-time": queued,
            "x-inference-time": running,
        }
        if row.completion_tokens:
            times["x-time-per-token"] = running / row.completion_tokens
        headers |= {name: str(int(seconds * 1000)) for name, seconds in times.items()}
    for name, tokens in (
        ("x-prompt-tokens", row.prompt_tokens),
        ("x-generated-tokens", row.completion_tokens),
    ):
        if tokens is not None:
            headers[name] = str(tokens)
    return headers


class EventWriter:
    """Encoder of /generate_stream's events: one per token; the last one also has the whole text.

    Only the end shows which token is the last, so each candidate is held back: an end token, the last one
    allowed, one that completes a stop text, and every token if the model's end tokens are unknown.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._reader = TokenReader(generation)
        self._max_tokens = generation.max_tokens
        self._end_ids = generation.format.end_ids if generation.format else frozenset()
        self._stops = tuple(generation.given.stop or ())
        self._longest = max(map(len, self._stops), default=0)
        self._ending = ""  # of the text, as long as the longest stop text
        self._index = 0
        self._held: dict[str, Any] | None = None
        self._last: dict[str, Any] | None = None

    def add(self, text: str, positions: Sequence[Mapping[str, Any]]) -> bytes:
        if self._longest:
            self._ending = (self._ending + text)[-self._longest :]
        frames = []
        for place, position in enumerate(positions):
            if self._held is not None:
                frames.append(encode_frame(self._held))
            self._index += 1
            event = {"index": self._index, **self._reader.read(position)}
            event |= {"generated_text": None, "details": None}
            is_newest = place == len(positions) - 1
            self._held = event if self._may_be_last(event, is_newest=is_newest) else None
            if self._held is None:
                frames.append(encode_frame(event))
            self._last = event
        return b"".join(frames)

    def _may_be_last(self, event: dict[str, Any], *, is_newest: bool) -> bool:
        if not self._end_ids or self._max_tokens is None:
            return True
        return (
            event["token"]["id"] in self._end_ids
            or event["index"] >= self._max_tokens
            or (is_newest and self._ending.endswith(self._stops))
        )

    def end(self, row: ResultRow) -> bytes:
        event = self._held
        if event is None and self._last is not None:
            # The engine stopped at a token that was not held back: repeat it, with an empty text.
            event = self._last | {"token": self._last["token"] | {"text": ""}}
        if event is None:
            return encode_frame(
                {
                    "error": "Incomplete generation stream: there is no token",
                    "error_type": "incomplete_generation_stream",
                }
            )
        event["generated_text"] = self._generation.prefix + row.text
        if self._generation.given.details:
            event["details"] = {
                "finish_reason": finish_reason(row, self._generation.given.stop),
                "generated_tokens": row.completion_tokens,
                "seed": _seed(row),
                "input_length": row.prompt_tokens,
            }
        return encode_frame(event)


def encode_frame(event: Mapping[str, Any]) -> bytes:
    """Encode an event; TGI's have neither name nor id."""
    return b"data:%b\n\n" % orjson.dumps(event)


def token_frames(text: str, tokens: TokenizedText) -> Iterator[bytes]:
    """The list of a text's tokens as JSON, in pieces."""
    yield b"["
    for begin in range(0, len(tokens), _TOKENS_OF_PIECE):
        columns = (tokens.ids, tokens.starts, tokens.stops)
        piece = [
            {"id": identifier, "text": text[start:stop], "start": start, "stop": stop}
            for identifier, start, stop in zip(
                *(column[begin : begin + _TOKENS_OF_PIECE] for column in columns), strict=True
            )
        ]
        yield b"," * bool(begin) + orjson.dumps(piece)[1:-1]
    yield b"]"


def info_to_wire(model: str, max_total_tokens: int | None, version: str) -> dict[str, Any]:
    """The model and this service; TGI's other members are left out."""
    return {
        "model_id": model,
        "model_sha": None,
        "model_pipeline_tag": "text-generation",
        "max_best_of": MAX_BEST_OF,
        "max_stop_sequences": MAX_STOP_SEQUENCES,
        "max_input_tokens": None if max_total_tokens is None else max_total_tokens - 1,
        "max_total_tokens": max_total_tokens,
        "router": "llm-api-service",
        "version": version,
        "sha": None,
        "docker_label": None,
    }
