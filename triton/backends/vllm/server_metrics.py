"""Load and token counts of one model on Triton's metrics port, by the names vLLM users know."""

import gc

import triton_python_backend_utils as pb_utils

GAUGES = {
    "vllm:num_requests_running": "Requests in the engine's batch",
    "vllm:num_requests_waiting": "Requests accepted and not in the engine's batch",
}
COUNTERS = {
    "vllm:prompt_tokens_total": "Prompt tokens of all requests",
    "vllm:generation_tokens_total": "Tokens generated for all requests",
}


class ServerMetrics:
    """The counts are kept here and sent to Triton (a round trip each) only when they changed."""

    def __init__(self, model_name: str, model_version: str) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.published = dict.fromkeys((*GAUGES, *COUNTERS), 0)
        labels = {"model": model_name, "version": model_version}
        gauge, counter = pb_utils.MetricFamily.GAUGE, pb_utils.MetricFamily.COUNTER
        self.families = [
            pb_utils.MetricFamily(name=name, description=text, kind=kind)
            for names, kind in ((GAUGES, gauge), (COUNTERS, counter))
            for name, text in names.items()
        ]
        self.metrics = {
            name: family.Metric(labels=labels)
            for name, family in zip(self.published, self.families, strict=True)
        }

    def publish(self, running: int, waiting: int) -> None:
        counts = (running, waiting, self.prompt_tokens, self.generation_tokens)
        for (name, metric), count in zip(self.metrics.items(), counts, strict=True):
            if count == self.published[name]:
                continue
            if name in COUNTERS:
                metric.increment(count - self.published[name])
            else:
                metric.set(count)
            self.published[name] = count

    def close(self) -> None:
        """Their destructors talk to Triton, which ends the process by a signal when it happens
        after the end of finalize()."""
        self.metrics.clear()
        self.families.clear()
        gc.collect()
