"""Delivery of alerts about budgets: signed messages, repeated like those about results."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any
from uuid import UUID

import orjson

from app.core.database import Database
from app.core.polling import PollingLoop
from app.core.settings import Settings
from app.webhooks.delivery import SCHEDULE, message_id, verdict_after
from app.webhooks.outbox import Due, WebhookOutbox
from app.webhooks.sender import Sender, sign

logger = logging.getLogger(__name__)

_PERIOD_SECONDS = 5.0
_CALLS = 8  # at the same time
_MARGIN_SECONDS = 15.0  # of a claim beyond the call itself
_MAX_ERROR = 500  # characters

_CLAIM = """
WITH due AS (
  SELECT id FROM budget_alerts WHERE state = 'pending' AND next_attempt_at <= now()
  ORDER BY next_attempt_at LIMIT $1 FOR UPDATE SKIP LOCKED
)
UPDATE budget_alerts a
SET attempts = a.attempts + 1, next_attempt_at = now() + make_interval(secs => $2)
FROM due WHERE a.id = due.id
RETURNING a.id, a.team_id, a.token_id, a.month, a.threshold, a.url, a.max_tokens, a.max_cost,
  a.used_tokens, a.used_cost, a.attempts, a.created_at, a.next_attempt_at AS lease
"""
_CONCLUDE = """
UPDATE budget_alerts SET state = $3, next_attempt_at = now() + make_interval(secs => $4), error = $5
WHERE id = $1 AND state = 'pending' AND next_attempt_at = $2
"""


@dataclass(slots=True, frozen=True)
class Alert:
    """A message about a threshold, claimed by this process until `lease`."""

    id: UUID
    team_id: str
    token_id: str
    month: date
    threshold: int
    url: str
    max_tokens: int | None
    max_cost: float | None
    used_tokens: int
    used_cost: float
    attempts: int
    created_at: datetime
    lease: datetime


class BudgetAlerts:
    """Makes due calls until cancelled. One instance per process; `schedule` is in seconds."""

    def __init__(
        self,
        database: Database,
        outbox: WebhookOutbox,
        sender: Sender,
        settings: Settings,
        schedule: Sequence[float] = SCHEDULE,
    ) -> None:
        self._database = database
        self._outbox = outbox
        self._sender = sender
        self._currency = settings.currency
        self._schedule = schedule
        self._loop = PollingLoop("budget_alerts", self.deliver, seconds=_PERIOD_SECONDS)

    async def run(self) -> None:
        async with self._sender:
            await self._loop.run()

    async def deliver(self) -> float | None:
        """Call the receivers of due alerts; seconds until the next look, None for the usual time."""
        lease = self._sender.timeout + _MARGIN_SECONDS
        rows = await self._database.fetch(_CLAIM, _CALLS, lease)
        await asyncio.gather(*(self._call(Alert(**row)) for row in rows))
        return 0.0 if len(rows) == _CALLS else None

    async def _call(self, alert: Alert) -> None:
        secret = await self._outbox.secret(alert.team_id)
        body = event_body(alert, self._currency)
        headers = sign(secret.all, message_id(alert.id), body)
        outcome = await self._sender.send(alert.team_id, alert.url, headers, body)
        due = Due(alert.id, alert.team_id, alert.url, "", alert.attempts, alert.lease)
        verdict = verdict_after(due, outcome, self._schedule, "")
        if verdict.state == "failed":
            message = "the alert about a budget of team %s was given up: %s"
            extra = {"action": "budget_alert_given_up", "team_id": alert.team_id}
            logger.warning(message, alert.team_id, outcome.error, extra=extra)
        error = outcome.error and outcome.error[:_MAX_ERROR]
        await self._database.fetch(
            _CONCLUDE, alert.id, alert.lease, verdict.state, verdict.pause, error
        )


def event_body(alert: Alert, currency: str) -> bytes:
    """The message; `key` is null for a budget of the whole team."""
    event: dict[str, Any] = {
        "type": "budget.threshold",
        "timestamp": alert.created_at,
        "data": {
            "team": alert.team_id,
            "key": alert.token_id or None,
            "month": f"{alert.month:%Y-%m}",
            "threshold_percent": alert.threshold,
            "max_tokens": alert.max_tokens,
            "used_tokens": alert.used_tokens,
            "max_cost": alert.max_cost,
            "used_cost": alert.used_cost,
            "currency": currency,
        },
    }
    return orjson.dumps(event)
