"""/health: liveness and readiness. /metrics: Prometheus metrics."""

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from app.api.container import Services
from app.api.dependencies import ServicesOf
from app.api.json_codec import json_response
from app.core import metrics
from app.core.errors import ModelNotReadyError

router = APIRouter(tags=["health"])

_RETRY_SECONDS = 5


@router.head("/health", include_in_schema=False)
@router.get("/health", response_class=Response)
async def read_health(services: ServicesOf) -> Response:
    """Return 200 while the process responds; with `LLM_HEALTH=engine`, while a model can generate."""
    check_health(services)
    return Response()


@router.head("/health/live", include_in_schema=False)
@router.get("/health/live", response_class=Response)
async def read_liveness() -> Response:
    """Return 200 while the process responds, also while Triton or the database are unavailable."""
    return Response()


def check_health(services: Services) -> None:
    """Raise ModelNotReadyError if `LLM_HEALTH` is `engine` and no model can generate.

    The registry's last refresh decides: a health call sends no request to Triton.
    """
    registry = services.registry
    if services.settings.health == "process" or registry.can_generate:
        return
    raise ModelNotReadyError(
        f"No model can generate: {registry.triton_error or 'none is ready'}.",
        headers={"Retry-After": str(_RETRY_SECONDS)},
    )


@router.head("/health/ready", include_in_schema=False)
@router.get("/health/ready")
async def read_readiness(services: ServicesOf) -> Response:
    """Return 200 while results are accepted, otherwise 503; the body lists each part and its remedy.

    Results are accepted and wait while Triton or all workers are down.
    """
    return json_response(await services.readiness.report())


@router.get("/metrics", response_class=PlainTextResponse)
async def read_metrics(services: ServicesOf) -> Response:
    """Prometheus metrics of this process and of the queues; needs the scope `operate`."""
    return Response(await services.metrics_collector.text(), media_type=metrics.CONTENT_TYPE)
