"""The caller's key, and the webhooks of its team."""

from urllib.parse import quote

import msgspec

from llm_api_client.operations.paging import pages
from llm_api_client.schemas import Caller, Delivery
from llm_api_client.steps import Call, Feed, Request, exchange, fetch


def me() -> Call[Caller]:
    """The team, scopes and highest priority of the key.

    Raises:
        AuthenticationError: the key is missing, unknown, expired or revoked.
    """
    return (yield from fetch(Request("GET", "/me"), Caller))


class _Secret(msgspec.Struct):
    secret: str


def secret() -> Call[str]:
    """The secret that signs the team's messages, for `verify_webhook`."""
    read = yield from fetch(Request("GET", "/webhooks/secret"), _Secret)
    return read.secret


def rotate_secret() -> Call[str]:
    """Make a new secret; for a day messages are signed by the previous one, too."""
    request = Request("POST", "/webhooks/secret", is_repeatable=False)
    read = yield from fetch(request, _Secret)
    return read.secret


def deliveries(
    *, state: str | None = None, result_id: str | None = None, limit: int | None = None
) -> Feed[Delivery]:
    """Iterate over deliveries with their calls, newest results first; `limit` None: all."""
    yield from pages(
        "/webhooks/deliveries", Delivery, {"state": state, "result_id": result_id}, limit
    )


def redeliver(result_id: str) -> Call[None]:
    """Deliver a result again at once, under the same message id."""
    path = f"/webhooks/deliveries/{quote(result_id, safe='')}/redeliver"
    yield from exchange(Request("POST", path))
