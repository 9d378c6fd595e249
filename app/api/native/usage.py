"""/usage: tokens and engine time of results, by team, key, model and day."""

from datetime import UTC, date, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response

from app.api.dependencies import Name, PrincipalOf, ServicesOf
from app.api.json_codec import json_response
from app.api.native.usage_schemas import (
    BudgetRead,
    UsageRead,
    budget_to_wire,
    usage_to_csv,
    usage_to_wire,
)
from app.auth.principal import Principal
from app.core.errors import ForbiddenError, invalid_field
from app.results.usage.report import GROUPS, Group, UsageQuery

CSV_TYPE = "text/csv"
ALL_TEAMS = "*"

router = APIRouter(tags=["usage"])

First = Annotated[
    date | None,
    Query(alias="from", description="First UTC day; by default the first of the month of `to`."),
]
Last = Annotated[date | None, Query(alias="to", description="Last UTC day; by default today.")]
GroupBy = Annotated[
    str,
    Query(
        max_length=64,
        description=f"Members of each row, separated by commas: {', '.join(GROUPS)}. Empty: one row.",
    ),
]
Team = Annotated[
    Name,
    Query(
        description="Another team than the caller's, or `*` for all teams; needs the scope `operate`."
    ),
]


@router.get(
    "/usage",
    response_model=UsageRead,
    responses={200: {"content": {CSV_TYPE: {"schema": {"type": "string"}}}}},
)
async def read_usage(
    services: ServicesOf,
    principal: PrincipalOf,
    first: First = None,
    last: Last = None,
    group_by: GroupBy = "model",
    team: Team = None,
    key: Name = None,
    model: Name = None,
    format: Literal["json", "csv"] = "json",  # noqa: A002 - the name of the parameter
) -> Response:
    """Read how many results ended in a period, and the tokens and engine time that they used."""
    last = last or datetime.now(UTC).date()
    query = UsageQuery(
        first=first or last.replace(day=1),
        last=last,
        group_by=_groups(group_by),
        team_id=_team(principal, team),
        token_id=key,
        model_name=model,
    )
    rows = await services.usage.read(query)
    if format == "csv":
        name = f"usage-{query.first}-{query.last}.csv"
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(usage_to_csv(query, rows), headers=headers, media_type=CSV_TYPE)
    return json_response(usage_to_wire(query, rows, services.settings.currency))


@router.get("/usage/budgets", response_model=list[BudgetRead])
async def list_budgets(services: ServicesOf, principal: PrincipalOf, team: Team = None) -> Response:
    """List the monthly budgets of the team and of its keys."""
    budgets = await services.spending.list(_team(principal, team))
    currency = services.settings.currency
    return json_response([budget_to_wire(budget, currency) for budget in budgets])


def _groups(text: str) -> list[Group]:
    names = text.split(",") if text else []
    known: dict[str, Group] = {group: group for group in GROUPS}
    if any(name not in known for name in names) or len(set(names)) < len(names):
        raise invalid_field("group_by", f"names, each once, of {', '.join(GROUPS)}")
    return [known[name] for name in names]


def _team(principal: Principal, team: str | None) -> str | None:
    """The team to report on; None: all. Raises ForbiddenError for another team's."""
    if team is None or team == principal.team_id:
        return principal.team_id
    if "operate" not in principal.scopes:
        raise ForbiddenError("The usage of other teams needs a token with the scope `operate`.")
    return None if team == ALL_TEAMS else team
