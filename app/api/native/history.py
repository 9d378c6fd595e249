"""/history: a team's ended results per minute. /system: the state of the service."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from app import __version__
from app.api.dependencies import Name, ServicesOf, TeamOf
from app.api.json_codec import json_response
from app.api.native.history_schemas import PointRead, SystemRead, point_to_wire, system_to_wire
from app.results.stats.history import MAX_MINUTES

Minutes = Annotated[
    int, Query(ge=1, le=MAX_MINUTES, description="Length of the window in minutes; at most a day.")
]

router = APIRouter(tags=["history"])


@router.get("/history", response_model=list[PointRead])
async def read_history(
    services: ServicesOf, team: TeamOf, minutes: Minutes = 60, model_name: Name = None
) -> Response:
    """Read how many of the team's results ended in the last minutes, and their latencies.

    One point per model and step, the oldest first; a step has 1, 2, 5, 10 or 15 minutes, so that there
    are at most 120. Steps without ended results are left out. The last step is not over.
    """
    window = await services.history.window(minutes)
    points = await services.history.points(window, team, model_name)
    return json_response([point_to_wire(point, window) for point in points])


@router.get("/system", response_model=SystemRead)
async def read_system(services: ServicesOf, minutes: Minutes = 60) -> Response:
    """Read the state of database, workers and queues, and the history of all teams together."""
    return json_response(system_to_wire(await services.system.state(minutes), __version__))
