"""A plan for programs: the output of `python -m app plan --json` and of `POST /launches/plan`."""

from collections.abc import Sequence
from typing import Any

from app.provisioning.sizing.facts import ModelFacts
from app.provisioning.sizing.fit import Plan
from app.provisioning.sizing.weights import disk_bytes


def to_document(facts: ModelFacts, plans: Sequence[Plan]) -> dict[str, Any]:
    """The model and its plans as JSON members; sizes in bytes, those of a plan on each GPU."""
    return {
        "model": {
            "model_type": facts.model_type,
            "is_known": facts.is_known,
            "parameters": facts.parameters,
            "active_parameters": facts.active_parameters,
            "layers": facts.layers,
            "dtype": facts.dtype,
            "quantization": facts.quantization.method if facts.quantization else None,
            "max_context": facts.max_context,
            "disk_bytes": disk_bytes(facts),
            "notes": facts.notes,
        },
        "plans": [_plan(one) for one in plans],
    }


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "gpu": plan.gpu.name,
        "title": plan.gpu.title,
        "nodes": plan.nodes,
        "gpus": plan.gpus,
        "context": plan.context,
        "concurrency": plan.concurrency,
        "dtype": plan.dtype,
        "weights_bytes": plan.weights,
        "overhead_bytes": plan.overhead,
        "cache_bytes": plan.cache,
        "cache_bytes_per_token": plan.token_bytes,
        "cache_tokens": plan.tokens,
        "cache_requests": round(plan.requests, 2),
        "fits": plan.fits,
        "verdict": plan.verdict,
        "resources": plan.resources,
    }
