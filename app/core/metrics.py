"""Prometheus metrics: names, units, labels and bounds on the number of series.

Names follow https://prometheus.io/docs/practices/naming/: base units, `_total` for counters. Each
process counts its own events; Prometheus adds them up. The process that indexes an ended result
counts it, once, so these metrics cost nothing on the result's path.

The label `model` only takes names of models that results were stored for. Beyond a number of models
or teams the label is `other`.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

OTHER = "other"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MAX_NAMES = {"model": 100, "team": 200}
_ALIASES = {"gen_ai_request_model": "model"}  # labels with the same names
_MAX_SERIES = 2_000  # of one metric

_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 21_600, 86_400,
)  # fmt: skip
_SHORT_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10,
)  # fmt: skip
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 131_072)
_ITEMS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)

# The library's own metrics take a lock and many calls for each observation: three times the time of
# these. A process observes on one thread, that of its event loop; a scrape on another thread may see
# half of an observation, and the next scrape sees all of it.


class Counter:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


class Gauge(Counter):
    __slots__ = ()

    def dec(self) -> None:
        self.value -= 1.0

    def set(self, value: float) -> None:
        self.value = value


class Histogram:
    """Observations by size: a bucket counts those up to its bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


C = TypeVar("C", Counter, Gauge, Histogram)
_FAMILIES: dict[type, Any] = {
    Counter: CounterMetricFamily,
    Gauge: GaugeMetricFamily,
    Histogram: HistogramMetricFamily,
}

_registry = CollectorRegistry(auto_describe=False)
ProcessCollector(registry=_registry)  # CPU time, memory, open files
_names: dict[str, set[str]] = {label: set() for label in _MAX_NAMES}


def _bounded(label: str, name: str) -> str:
    label = _ALIASES.get(label, label)
    most = _MAX_NAMES.get(label)
    if most is None:
        return name
    known = _names[label]
    if name not in known:
        if len(known) >= most:
            return OTHER
        known.add(name)
    return name


class Series(Collector, Generic[C]):
    def __init__(self, name: str, text: str, make: Callable[[], C], labels: Sequence[str]) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._make: Callable[[], C] = make
        self._series: dict[tuple[str, ...], C] = {}
        if not labels:
            self._series[()] = make()  # exported as zero from the start
        _registry.register(self)

    def of(self, *values: str) -> C:
        """Series of these label values, or the one that stands for them."""
        found = self._series.get(values)
        return found if found is not None else self._add(values)

    def _add(self, values: tuple[str, ...]) -> C:
        bounded = tuple(_bounded(*one) for one in zip(self._labels, values, strict=True))
        if bounded not in self._series and len(self._series) >= _MAX_SERIES:
            bounded = (OTHER,) * len(values)
        return self._series.setdefault(bounded, self._make())

    def clear(self) -> None:
        self._series.clear()

    def collect(self) -> Iterator[Metric]:
        family = _FAMILIES[type(self._make())](self._name, self._text, labels=self._labels)
        for values, found in list(self._series.items()):
            if isinstance(found, Histogram):
                family.add_metric(values, found.buckets(), found.sum)
            else:
                family.add_metric(values, found.value)
        yield family


def _counter(name: str, text: str, *labels: str) -> Series[Counter]:
    return Series(name, text, Counter, labels)


def _gauge(name: str, text: str, *labels: str) -> Series[Gauge]:
    return Series(name, text, Gauge, labels)


def _histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Series[Histogram]:
    return Series(name, text, lambda: Histogram(buckets), labels)


# --- Requests ------------------------------------------------------------------------------------

SUBMISSIONS = _counter(
    "llm_submissions_total", "Results accepted: committed to the queue.", "model"
)
REFUSALS = _counter("llm_refusals_total", "Requests refused, by error code.", "code")
REQUESTS = _counter("llm_http_requests_total", "HTTP requests answered, by status.", "status")
OPEN_REQUESTS = _gauge(
    "llm_http_requests_in_flight",
    "HTTP requests being answered: long-polls and streams among them.",
).of()
BYTES_IN_FLIGHT = _gauge(
    "llm_bytes_in_flight", "Memory that the texts of requests and responses hold, in bytes."
).of()

# --- Ended results: each is counted once, about a second after its end -----------------------------

RESULTS = _counter(
    "llm_results_total", "Results that ended: `completed`, or the error's code.", "model", "code"
)
RESULT_SECONDS = _histogram(
    "llm_result_seconds", "From acceptance to the end of a result.", _SECONDS, "model"
)
QUEUE_WAIT = _histogram(
    "llm_queue_wait_seconds", "From acceptance to the claim by a worker.", _SECONDS, "model"
)
FIRST_TOKEN = _histogram(
    "llm_time_to_first_token_seconds",
    "From acceptance to the first text of the model.",
    _SECONDS,
    "model",
)
INFERENCE = _histogram(
    "llm_inference_seconds", "From the claim to the end of a result.", _SECONDS, "model"
)
INTER_TOKEN = _histogram(
    "llm_inter_token_seconds",
    "Mean time from one token to the next of a result, after its first.",
    _SHORT_SECONDS,
    "model",
)
PROMPT_TOKENS = _counter(
    "llm_prompt_tokens_total", "Tokens of prompts of results that ended.", "team", "model"
)
COMPLETION_TOKENS = _counter(
    "llm_completion_tokens_total", "Tokens generated for results that ended.", "team", "model"
)
RESULT_PROMPT_TOKENS = _histogram(
    "llm_result_prompt_tokens", "Tokens of a result's prompt.", _TOKENS, "model"
)
RESULT_COMPLETION_TOKENS = _histogram(
    "llm_result_completion_tokens", "Tokens generated for a result.", _TOKENS, "model"
)
RESULT_MAX_TOKENS = _histogram(
    "llm_result_max_tokens", "Most tokens that a result was allowed.", _TOKENS, "model"
)

WITHOUT_WORDS = _counter(
    "llm_results_without_words_total",
    "Results that no search by words finds, as their texts have too many or take too long.",
).of()

# --- Workers -------------------------------------------------------------------------------------

IN_FLIGHT = _gauge("llm_in_flight", "Results that this process runs now.", "model")
ATTEMPTS = _counter(
    "llm_attempts_total",
    "Attempts that ended here: completed, failed, lost (to be tried again) or returned.",
    "model",
    "outcome",
)
TRITON_ERROR_KINDS = ("not_taken", "lost", "refused", "failed", "dead")
TRITON_ERRORS = _counter(
    "llm_triton_errors_total",
    "Streams that Triton refused or broke: not_taken, lost, refused, failed or dead.",
    "model",
    "kind",
)
RESCUES = _counter("llm_lease_rescues_total", "Results freed of workers that were lost.").of()
FENCES = _counter("llm_lease_fences_total", "Times that a worker stopped itself.").of()
FLUSH = _histogram(
    "llm_flush_seconds", "Writes of the text of running results.", _SHORT_SECONDS
).of()
WEBHOOKS = _counter(
    "llm_webhook_calls_total",
    "Calls of webhooks: delivered, to be retried, or given up.",
    "outcome",
)
for _outcome in ("delivered", "to_be_retried", "given_up"):
    WEBHOOKS.of(_outcome)  # a rate needs the series to exist before it grows

# --- Database ------------------------------------------------------------------------------------

BATCH_SIZE = _histogram(
    "llm_group_commit_batch_size", "Items that shared one statement, by lane.", _ITEMS, "lane"
)
POOL_WAIT = _histogram(
    "llm_database_pool_wait_seconds",
    "Waits for a connection of the process's pool.",
    _SHORT_SECONDS,
).of()
DATABASE_UP = _gauge("llm_database_up", "Whether the database answered the last look.").of()

# --- The whole service, read from the database: every API process exports the same values ---------

QUEUE_DEPTH = _gauge("llm_queue_depth", "Results that wait for a worker.", "model")
QUEUE_OLDEST = _gauge("llm_queue_oldest_seconds", "Age of the oldest result that waits.", "model")
RUNNING = _gauge("llm_running", "Results that run, as last reported by the workers.", "model")
WORKERS = _gauge("llm_workers", "Workers that renew their lease.", "kind")
MODEL_READY = _gauge("llm_model_ready", "Whether some server has the model ready: 1 or 0.", "model")
ENGINES_DEAD = _gauge(
    "llm_engines_dead", "Servers on which the model's engine answers no probe.", "model"
)


def show(series: Series[Gauge], values: Mapping[str, float]) -> None:
    """Replace all series of a gauge with one label."""
    series.clear()
    for value, number in values.items():
        series.of(value).inc(number)


# Names of text-generation-inference for the same metrics, for its dashboards. Its server has one
# model; here each series also has the label `model`.
# https://huggingface.co/docs/text-generation-inference/reference/metrics
_TGI = (
    ("counter", r"llm_submissions_total", "tgi_request_count"),
    ("counter", r'llm_results_total\{code="completed",', "tgi_request_success{"),
    ("counter", r'llm_results_total\{code="(?!completed")', 'tgi_request_failure{err="'),
    ("histogram", r"llm_result_seconds", "tgi_request_duration"),
    ("histogram", r"llm_queue_wait_seconds", "tgi_request_queue_duration"),
    ("histogram", r"llm_inference_seconds", "tgi_request_inference_duration"),
    ("histogram", r"llm_inter_token_seconds", "tgi_request_mean_time_per_token_duration"),
    ("histogram", r"llm_result_completion_tokens", "tgi_request_generated_tokens"),
    ("histogram", r"llm_result_prompt_tokens", "tgi_request_input_length"),
    ("histogram", r"llm_result_max_tokens", "tgi_request_max_new_tokens"),
    ("gauge", r"llm_queue_depth", "tgi_queue_size"),
    ("gauge", r"llm_running", "tgi_batch_current_size"),
)


def render() -> bytes:
    text: str = generate_latest(_registry).decode()
    pieces = [text]
    for kind, pattern, name in _TGI:
        lines = re.findall(rf"^{pattern}(?:(?<=[{{\",])|(?=[{{_ ])).*$", text, re.MULTILINE)
        renamed = [re.sub(pattern, name, line, count=1) for line in lines]
        if renamed:
            pieces.append(f"# TYPE {name.partition('{')[0]} {kind}\n" + "\n".join(renamed) + "\n")
    return "".join(pieces).encode()
