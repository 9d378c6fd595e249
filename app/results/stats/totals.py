"""Totals of ended results, by minute, team, model and end, and their metrics."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import orjson

from app.core import gen_ai, metrics
from app.core.database import Connection
from app.results.rows import EndedResult
from app.results.stats import histogram

_SUMS = ("results", "prompt_tokens", "completion_tokens")
_HISTOGRAMS = ("queue_seconds", "first_token_seconds", "seconds")
_NAMES = ("team_id", "minute", "model_name", "ended_as", *_SUMS, *_HISTOGRAMS)


def _added(name: str) -> str:
    return (
        f"{name} = ARRAY(SELECT a + b FROM unnest(s.{name}, excluded.{name})"
        " WITH ORDINALITY AS i(a, b, place) ORDER BY place)"
    )


_ADD = f"""
INSERT INTO minute_stats AS s ({", ".join(_NAMES)})
SELECT {", ".join(_NAMES)} FROM jsonb_to_recordset($1::jsonb) AS i(
  team_id text, minute timestamptz, model_name text, ended_as text, results int,
  prompt_tokens bigint, completion_tokens bigint,
  {", ".join(f"{name} int[]" for name in _HISTOGRAMS)})
ON CONFLICT (team_id, minute, model_name, ended_as) DO UPDATE SET
  {", ".join(f"{name} = s.{name} + excluded.{name}" for name in _SUMS)},
  {", ".join(_added(name) for name in _HISTOGRAMS)}
"""

_Key = tuple[str, datetime, str, str]


@dataclass(slots=True)
class _Totals:
    results: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    queue_seconds: list[int] = field(default_factory=lambda: [0] * histogram.SIZE)
    first_token_seconds: list[int] = field(default_factory=lambda: [0] * histogram.SIZE)
    seconds: list[int] = field(default_factory=lambda: [0] * histogram.SIZE)

    def add(self, result: EndedResult) -> None:
        self.results += 1
        self.prompt_tokens += result.prompt_tokens or 0
        self.completion_tokens += result.completion_tokens or 0
        self.seconds[histogram.bucket_of(result.ended - result.created)] += 1
        if result.started is not None:
            self.queue_seconds[histogram.bucket_of(result.started - result.created)] += 1
            if result.first_token is not None:
                first_token = result.first_token - result.started
                self.first_token_seconds[histogram.bucket_of(first_token)] += 1


async def add_to_minutes(connection: Connection, results: Iterable[EndedResult]) -> None:
    totals: dict[_Key, _Totals] = {}
    for result in results:
        minute = result.finished_at.replace(second=0, microsecond=0)
        key = (result.team_id, minute, result.model_name, result.ended_as)
        totals.setdefault(key, _Totals()).add(result)
    if totals:
        await connection.execute(_ADD, orjson.dumps(list(_to_rows(totals))).decode())


def _to_rows(totals: dict[_Key, _Totals]) -> Iterator[dict[str, Any]]:
    """Rows in the order of their keys, in which every process locks them."""
    for key, total in sorted(totals.items(), key=lambda item: item[0]):
        values = (*key, *(getattr(total, name) for name in (*_SUMS, *_HISTOGRAMS)))
        yield dict(zip(_NAMES, values, strict=True))


def observe(result: EndedResult) -> None:
    """Add a result to the metrics of this process."""
    _observe_by_conventions(result)
    model = result.model_name
    metrics.RESULTS.of(model, result.ended_as).inc()
    metrics.RESULT_SECONDS.of(model).observe(max(0.0, result.ended - result.created))
    for tokens, total, each in (
        (result.prompt_tokens, metrics.PROMPT_TOKENS, metrics.RESULT_PROMPT_TOKENS),
        (result.completion_tokens, metrics.COMPLETION_TOKENS, metrics.RESULT_COMPLETION_TOKENS),
    ):
        if tokens:
            total.of(result.team_id, model).inc(tokens)
            each.of(model).observe(tokens)
    if result.max_tokens is not None:
        metrics.RESULT_MAX_TOKENS.of(model).observe(result.max_tokens)
    if result.started is None:
        return
    metrics.QUEUE_WAIT.of(model).observe(max(0.0, result.started - result.created))
    metrics.INFERENCE.of(model).observe(max(0.0, result.ended - result.started))
    if result.first_token is not None:
        metrics.FIRST_TOKEN.of(model).observe(max(0.0, result.first_token - result.created))
        if (seconds := result.seconds_per_token) is not None:
            metrics.INTER_TOKEN.of(model).observe(seconds)


def _observe_by_conventions(result: EndedResult) -> None:
    """Add a result to the metrics of OpenTelemetry's conventions."""
    operation = gen_ai.operation_of(result.kind, is_chat=result.is_chat)
    if operation is None:
        return
    labels = operation, gen_ai.PROVIDER, result.model_name
    is_completed = result.ended_as == "completed"
    error = "" if is_completed else result.ended_as
    gen_ai.REQUEST_DURATION.of(*labels, error).observe(max(0.0, result.ended - result.created))
    for tokens, kind in ((result.prompt_tokens, "input"), (result.completion_tokens, "output")):
        if tokens:
            gen_ai.TOKEN_USAGE.of(*labels, kind).observe(tokens)
    if not is_completed or result.started is None or result.first_token is None:
        return
    gen_ai.TIME_TO_FIRST_TOKEN.of(*labels).observe(max(0.0, result.first_token - result.created))
    if (seconds := result.seconds_per_token) is not None:
        gen_ai.TIME_PER_OUTPUT_TOKEN.of(*labels).observe(seconds)
