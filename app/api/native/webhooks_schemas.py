"""Wire schemas of webhooks: deliveries with their log, and the team's secret."""

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import orjson
from pydantic import BaseModel, Field

from app.webhooks.outbox import Delivery, TeamSecret


class CallRead(BaseModel):
    at: datetime
    status: int | None = Field(
        description="Status of the receiver's response; null if there was none."
    )
    error: str | None = Field(description="Why the delivery failed; null if it succeeded.")
    seconds: float


class DeliveryRead(BaseModel):
    """Delivery of one terminal result, or of one ended job, to its webhook."""

    id: UUID = Field(description="The id of the result or job: each has one delivery.")
    result_id: UUID | None = Field(description="Null if it is a job's.")
    job_id: UUID | None = Field(description="Null if it is a result's.")
    url: str
    state: Literal["pending", "delivered", "failed"]
    attempts: int = Field(description="Calls since it was created, or redelivered.")
    next_attempt_at: datetime | None = Field(
        description="While pending: time of the next call; during a call, time at which it counts as lost."
    )
    created_at: datetime
    finished_at: datetime | None
    log: list[CallRead] = Field(description="The last 20 calls, the oldest first.")


class SecretRead(BaseModel):
    secret: str = Field(
        description="For the receiver, in the format of Standard Webhooks' libraries."
    )
    rotated_at: datetime
    previous_valid_until: datetime | None = Field(
        description="Until then messages are signed by the previous secret too."
    )


def delivery_to_wire(delivery: Delivery) -> dict[str, Any]:
    identifier = str(delivery.result_id)
    return {
        "id": identifier,
        "result_id": None if delivery.is_job else identifier,
        "job_id": identifier if delivery.is_job else None,
        "url": delivery.url,
        "state": delivery.state,
        "attempts": delivery.attempts,
        "next_attempt_at": delivery.next_attempt_at if delivery.state == "pending" else None,
        "created_at": delivery.created_at,
        "finished_at": delivery.finished_at,
        "log": orjson.Fragment(delivery.log),
    }


def secret_to_wire(secret: TeamSecret) -> dict[str, Any]:
    return {
        "secret": secret.secret,
        "rotated_at": secret.rotated_at,
        "previous_valid_until": secret.previous_expires_at,
    }
