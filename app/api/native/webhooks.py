"""/webhooks/: log of deliveries, redelivery, and the team's signing secret."""

from typing import Literal
from uuid import UUID

from fastapi import APIRouter, Request, Response

from app.api.dependencies import ServicesOf, TeamOf, to_id
from app.api.json_codec import json_response
from app.api.native.webhooks_schemas import (
    DeliveryRead,
    SecretRead,
    delivery_to_wire,
    secret_to_wire,
)
from app.api.pagination import After, Limit, last_of_full, page_response
from app.core.byte_budget import read_within

router = APIRouter(tags=["webhooks"])

_DELIVERY_BYTES = 8_192  # of a delivery with the log of its calls, about
# Caches must not store a secret.
_NO_STORE = {"Cache-Control": "no-store"}


@router.get("/webhooks/deliveries", response_model=list[DeliveryRead])
async def list_deliveries(
    request: Request,
    services: ServicesOf,
    team: TeamOf,
    state: Literal["pending", "delivered", "failed"] | None = None,
    result_id: UUID | None = None,
    limit: Limit = 50,
    after: After = None,
) -> Response:
    """List deliveries, the newest results first; each with the log of its calls."""
    rows, _ = await read_within(
        limit * _DELIVERY_BYTES,
        lambda: services.outbox.list(
            team, state=state, result_id=result_id, after=after, limit=limit
        ),
        lambda rows: sum(len(row.url) + len(row.log) for row in rows),
    )
    items = [delivery_to_wire(row) for row in rows]
    return await page_response(request, items, last_of_full(items, limit))


@router.post(
    "/webhooks/deliveries/{delivery_id}/redeliver", status_code=202, response_model=DeliveryRead
)
async def redeliver(delivery_id: str, services: ServicesOf, team: TeamOf) -> Response:
    """Deliver a result again, at once, under the same message id, in any state of its delivery.

    `attempts` restarts at 0, with the whole schedule; the log continues.
    """
    row = await services.outbox.redeliver(team, to_id(delivery_id, "delivery"))
    return json_response(delivery_to_wire(row), 202)


@router.get("/webhooks/secret", response_model=SecretRead)
async def read_secret(services: ServicesOf, team: TeamOf) -> Response:
    """Read the secret that signs the team's messages; the first call creates it."""
    secret = await services.outbox.secret(team)
    return json_response(secret_to_wire(secret), headers=_NO_STORE)


@router.post("/webhooks/secret", response_model=SecretRead)
async def rotate_secret(services: ServicesOf, team: TeamOf) -> Response:
    """Rotate the secret: the previous one signs too for a while; older ones no longer do."""
    secret = await services.outbox.rotate_secret(team)
    return json_response(secret_to_wire(secret), headers=_NO_STORE)
