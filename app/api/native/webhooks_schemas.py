"""Webhooks' wire shapes: deliveries with their log, and the team's secret."""

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import orjson
from pydantic import BaseModel, Field

from app.webhooks.outbox import Delivery, TeamSecret


class CallRead(BaseModel):
    """One call of a delivery."""

    at: datetime
    status: int | None = Field(description="The receiver's answer; null if there was none.")
    error: str | None = Field(description="Why the message counts as not taken; null if it was.")
    seconds: float


class DeliveryRead(BaseModel):
    """What is known of telling one terminal result to its webhook."""

    id: UUID = Field(description="The result's id: a result is told once.")
    result_id: UUID
    url: str
    state: Literal["pending", "delivered", "failed"]
    attempts: int = Field(description="Calls begun since it was written, or redelivered.")
    next_attempt_at: datetime | None = Field(
        description="While pending: when the next call is due; during a call, when it counts as lost."
    )
    created_at: datetime
    finished_at: datetime | None
    log: list[CallRead] = Field(description="The last 20 calls, the oldest first.")


class SecretRead(BaseModel):
    """What the team's messages are signed with."""

    secret: str = Field(description="For the receiver, as Standard Webhooks' libraries take it.")
    rotated_at: datetime
    previous_valid_until: datetime | None = Field(
        description="Until then messages carry a signature by the secret before this one as well."
    )


def delivery_to_wire(delivery: Delivery) -> dict[str, Any]:
    """A delivery as JSON members."""
    identifier = str(delivery.result_id)
    return {
        "id": identifier,
        "result_id": identifier,
        "url": delivery.url,
        "state": delivery.state,
        "attempts": delivery.attempts,
        "next_attempt_at": delivery.next_attempt_at if delivery.state == "pending" else None,
        "created_at": delivery.created_at,
        "finished_at": delivery.finished_at,
        "log": orjson.Fragment(delivery.log),
    }


def secret_to_wire(secret: TeamSecret) -> dict[str, Any]:
    """A team's secret as JSON members; the previous one is never shown."""
    return {
        "secret": secret.secret,
        "rotated_at": secret.rotated_at,
        "previous_valid_until": secret.previous_expires_at,
    }
