"""Notifications as part of a statement: they are sent when it commits."""

from app.core.listener import ENQUEUED, WEBHOOKS

_MAX_PAYLOAD = 7000  # bytes; PostgreSQL refuses 8,000


def notify_ids(channel: str, condition: str = "true") -> str:
    """Notify a channel of the ids of the rows that meet a condition, if there are any."""
    return f"""CASE WHEN count(*) FILTER (WHERE {condition}) > 0 THEN pg_notify('{channel}',
    string_agg(replace(id::text, '-', ''), ',') FILTER (WHERE {condition})) END"""


def notify_enqueued(condition: str = "true") -> str:
    return f"""CASE WHEN count(*) FILTER (WHERE {condition}) > 0 THEN pg_notify('{ENQUEUED}',
    left(string_agg(DISTINCT model_name, ',') FILTER (WHERE {condition}), {_MAX_PAYLOAD})) END"""


NOTIFY_DELIVERIES = (
    f"CASE WHEN EXISTS (SELECT FROM deliveries) THEN pg_notify('{WEBHOOKS}', '') END"
)
