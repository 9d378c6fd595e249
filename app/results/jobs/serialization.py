"""Jobs as JSON members, for the native API and webhooks."""

from typing import Any

import orjson

from app.core.ids import created_at
from app.results.jobs.rows import Job


def job_to_wire(job: Job) -> dict[str, Any]:
    state = job.state
    return {
        "id": str(job.id),
        "name": job.name,
        "key": job.key,
        "state": state,
        "total": job.total,
        "priority": job.priority,
        "deadline_seconds": job.deadline_seconds,
        "webhook_url": job.webhook_url,
        "metadata": orjson.Fragment(job.metadata),
        "counts": {
            "rows": job.rows,
            "pending": job.pending,
            "completed": job.completed,
            "failed": sum(job.errors.values()),
        },
        "errors": job.errors,
        "last_place": job.last_place,
        "estimated_seconds_left": job.seconds_left,
        "usage": {
            "prompt_tokens": job.prompt_tokens,
            "completion_tokens": job.completion_tokens,
        },
        "created_at": created_at(job.id),
        "closed_at": job.closed_at,
        "cancel_requested_at": job.cancel_requested_at,
        "ended_at": job.ended_at if state == "ended" else None,
    }
