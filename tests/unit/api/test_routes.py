"""Rules for all routes."""

import inspect
from collections.abc import Iterator

from fastapi.dependencies.models import Dependant
from fastapi.routing import iter_route_contexts

from app.api.app import create_app
from app.core.settings import Settings


def test_nothing_of_a_request_runs_in_a_thread() -> None:
    """The framework calls handlers and dependencies that are no coroutines in a thread each."""
    values = {"host": "db", "user": "u", "password": "p", "name": "n"}
    settings = Settings.model_validate({f"database_{key}": text for key, text in values.items()})
    routes = [
        route
        for one in iter_route_contexts(create_app(settings).routes)
        if (route := getattr(one, "route", one)) and hasattr(route, "dependant")
    ]
    assert len(routes) > 60
    calls = {call for route in routes for call in calls_of(route.dependant)}
    assert len(calls) > 60
    assert not [call for call in calls if not inspect.iscoroutinefunction(call)]


def calls_of(dependant: Dependant) -> Iterator[object]:
    yield dependant.call
    for one in dependant.dependencies:
        yield from calls_of(one)
