"""Virtual time: the place of a result in its queue among those of equal priority (docs/limits.md)."""


def is_queue_empty_sql(model: str) -> str:
    """Condition: no result waits for a model.

    A probe in the queue's order: NOT EXISTS may become a join, which reads all that waits.
    """
    return f"""(
    SELECT q.id FROM results q
    WHERE q.model_name = {model} AND q.state = 'pending' AND q.worker_id IS NULL
    ORDER BY q.priority DESC, q.fair_key, q.id LIMIT 1) IS NULL"""


def first_key_sql(row: str) -> str:
    """Return the key at the head of the queue of `row`; NULL if nothing waits there."""
    return _key_sql(row, "", "ASC")


def next_key_sql(row: str) -> str:
    """Return the key of a team's next result: one step behind its last one, else at the head.

    One or two probes of an index; nothing is stored of results that have left the queue.
    """
    last = _key_sql(row, f"q.team_id = {row}.team_id AND", "DESC")
    return f"coalesce({last} + {row}.step, {first_key_sql(row)}, 0)"


def step_behind_sql(row: str) -> str:
    """Return the distance of one of a team's new results behind the first of them."""
    return f"""{row}.step * (row_number() OVER (
           PARTITION BY {row}.team_id, {row}.model_name, {row}.priority ORDER BY {row}.id) - 1)"""


def _key_sql(row: str, team: str, order: str) -> str:
    return f"""(
    SELECT q.fair_key FROM results q
    WHERE q.model_name = {row}.model_name AND {team}
      q.priority = {row}.priority AND q.state = 'pending' AND q.worker_id IS NULL
    ORDER BY q.fair_key {order} LIMIT 1)"""
