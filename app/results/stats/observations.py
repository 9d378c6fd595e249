"""Metrics of ended results: totals and histograms of this process."""

from app.core import metrics
from app.results.rows import EndedResult


def observe(result: EndedResult) -> None:
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
        if (result.completion_tokens or 0) > 1:
            assert result.completion_tokens is not None
            spent = max(0.0, result.ended - result.first_token)
            metrics.INTER_TOKEN.of(model).observe(spent / (result.completion_tokens - 1))
