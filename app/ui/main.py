"""The web page's application: `create_ui` combines pages, guard, sign-in and static files."""

import contextlib
import logging
from collections.abc import AsyncIterator, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from app.ui.api import Client
from app.ui.bulk.background import Background
from app.ui.bulk.uploaded_file import SpaceBudget
from app.ui.errors import RefusedError, SignInError
from app.ui.exposure import ExposureGuard
from app.ui.guard import HEADERS, READY_PATH, BodyTooLargeError, Guard
from app.ui.pages import (
    bulk,
    bulk_jobs,
    compare,
    downloads,
    fleet,
    history,
    history_result,
    launches,
    live,
    playground,
    sign_in,
    system,
    usage,
)
from app.ui.render import STATIC, fragment, page
from app.ui.sending import kept_fields
from app.ui.session import SessionMiddleware, Sessions
from app.ui.settings import UiSettings

logger = logging.getLogger(__name__)

_MAX_FORM_BYTES = 10_000_000
_UNAVAILABLE = (502, 503, 504)
_PAGES = (
    playground,
    compare,
    history,
    history_result,
    bulk,
    bulk_jobs,
    live,
    fleet,
    downloads,  # before the launches, whose ids are any segment
    launches,
    usage,
    system,
    sign_in,
)


def create_ui(settings: UiSettings) -> Starlette:
    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.client = Client(str(settings.api_url))
        app.state.bulk_background = Background()
        yield
        await app.state.bulk_background.close()
        await app.state.client.close()

    sessions = Sessions(settings)
    app = Starlette(
        lifespan=lifespan,
        routes=[
            Route("/", _home),
            Route(READY_PATH, _ready),
            *(route for module in _PAGES for route in module.routes),
            Mount("/static", _Assets(directory=STATIC)),
        ],
        middleware=[
            Middleware(
                Guard,
                allowed_hosts=settings.allowed_hosts,
                max_form_bytes=_MAX_FORM_BYTES,
                bounds={
                    bulk.UPLOADS: settings.max_upload_bytes + bulk.FORM_BYTES,
                    sign_in.PATH: sign_in.FORM_BYTES,
                },
            ),
            Middleware(SessionMiddleware, sessions=sessions),
            Middleware(ExposureGuard, settings=settings),
        ],
        exception_handlers={
            SignInError: _on_sign_in,
            RefusedError: _on_refused,
            BodyTooLargeError: _on_too_large,
            HTTPException: _on_http_error,
            Exception: _on_unexpected,
        },
    )
    app.state.settings = settings
    app.state.sessions = sessions
    app.state.bulk_space = SpaceBudget(settings.max_upload_bytes)
    return app


class _Assets(StaticFiles):
    """Files that browsers cache, as their address changes with their content (`render.asset`)."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        is_versioned = bool(scope["query_string"])
        response.headers["cache-control"] = (
            "public, max-age=31536000, immutable" if is_versioned else "no-cache"
        )
        return response


async def _home(_: Request) -> Response:
    return RedirectResponse("/playground", 303)


async def _ready(_: Request) -> Response:
    return Response("ok", media_type="text/plain")


async def _on_sign_in(request: Request, _: Exception) -> Response:
    return await sign_in.require_sign_in(request)


async def _on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    titles = {403: "Not allowed", 404: "Not found", 410: "Gone"}
    other = "Refused" if 400 <= error.status < 500 else "Not available now"
    title = titles.get(error.status, other)
    response = await _error_page(request, error, title, await kept_fields(request))
    if error.retry_after:
        response.headers["retry-after"] = error.retry_after
    return response


async def _on_too_large(request: Request, error: Exception) -> Response:
    return await _error_page(request, RefusedError(413, "too_large", str(error)), "Too large")


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    words = {404: "There is no such page.", 405: "This page takes no such request."}
    shown = RefusedError(status, "refused", words.get(status, error.detail))
    return await _error_page(request, shown, "Not found" if status == 404 else "Refused")


async def _on_unexpected(request: Request, _: Exception) -> Response:
    # Starlette raises it again after this, and the server logs it: the page shows no trace of it.
    message = "The page failed; its log has the reason. Requests that you sent before are kept."
    shown = RefusedError(500, "internal_error", message)
    response = await _error_page(request, shown, "Internal error")
    response.headers.update(HEADERS)  # this handler is outside of the guard
    return response


async def _error_page(
    request: Request,
    error: RefusedError,
    title: str,
    fields: Sequence[tuple[str, str]] = (),
) -> Response:
    """A page with the error and its remedy; `fields` are of a form to be sent again."""
    context = {
        "title": title,
        "message": error.message,
        "fields": fields,
        # While the API starts, the page reloads by itself.
        "is_unavailable": request.method == "GET" and error.status in _UNAVAILABLE,
    }
    try:
        return await page(request, "error.html", error, **context)
    except SignInError:
        return fragment(request, "error.html", error.status, me=None, **context)
