"""/history: what became of a team's results by the minute. /system: the state of the service."""

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from app import __version__
from app.api.common import Name, ServicesOf, TeamOf
from app.api.json_codec import json_response
from app.api.native.history_schemas import PointRead, SystemRead, points_to_wire, system_to_wire
from app.results.stats.history import MAX_MINUTES

Minutes = Annotated[
    int, Query(ge=1, le=MAX_MINUTES, description="How far back, in minutes; a day at most.")
]

router = APIRouter(tags=["history"])


@router.get("/history", response_model=list[PointRead])
async def read_history(
    services: ServicesOf, team: TeamOf, minutes: Minutes = 60, model_name: Name = None
) -> Response:
    """Read how many results of the team ended in the last minutes, and how long they took.

    By model and step, the oldest first; a step has 1, 2, 5, 10 or 15 minutes, so that there are 120
    at most. Where nothing ended there is nothing. The last step is not over.
    """
    window = await services.history.window(minutes)
    points = await services.history.points(window, team, model_name)
    return json_response(points_to_wire(points, window))


@router.get("/system", response_model=SystemRead)
async def read_system(services: ServicesOf, minutes: Minutes = 60) -> Response:
    """Read the state of database, workers and queues, and the history of all teams together."""
    return json_response(system_to_wire(await services.system.state(minutes), __version__))
