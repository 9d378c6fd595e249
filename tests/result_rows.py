"""A result's row with plausible columns, for tests of what is made of rows."""

from typing import Any

from app.core.ids import new_id
from app.results.rows import ResultRow


def result_row(**columns: Any) -> ResultRow:
    """A completed generation; `columns` replace its own."""
    completed: dict[str, Any] = dict.fromkeys(ResultRow._fields) | {
        "id": new_id(),
        "team_id": "default",
        "context_id": new_id(),
        "model_name": "m",
        "state": "completed",
        "output": "x",
        "finish_reason": "stop",
        "parameters": "{}",
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "attempt": 1,
        "metadata": "{}",
        "store": True,
        "kind": "generation",
        "continuations": 0,
    }
    return ResultRow(**completed | columns)
