"""Signing in with a token, and out. A form that met the end of a sign-in is sent after the next one."""

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from app.ui.api import Api, visitor_of
from app.ui.errors import RefusedError, SignInError
from app.ui.render import fragment
from app.ui.sending import fields_of, kept_fields, read_form
from app.ui.session import TokenTooLongError, safe_path

PATH = "/sign-in"
# Any visitor may send it, and its kept fields are shown again when a token is wrong.
FORM_BYTES = 1_000_000
_MAX_KEPT_BYTES = 900_000  # of the kept fields: they come back under longer names
_RESUME = "resume."  # prefix of the names of the kept fields


async def show(request: Request) -> Response:
    return _form(request, 200, next_path=safe_path(request.query_params.get("next", "/")))


async def submit(request: Request) -> Response:
    form = await read_form(request)
    token, next_path = str(form.get("token", "")).strip(), safe_path(str(form.get("next", "/")))
    resumed = [(name, value) for name, value in fields_of(form) if name.startswith(_RESUME)]

    def again(status: int, problem: str) -> Response:
        return _form(request, status, next_path=next_path, problem=problem, resumed=resumed)

    if not token.isascii() or not token.isprintable() or not token:
        return again(422, "Give a token.")
    try:
        await Api(request.app.state.client, token, visitor_of(request)).get("/me")
    except SignInError as error:
        words = "The API does not take this token: it may be cut off, expired or revoked."
        return again(401, f"{words} ({error.message.rstrip('.')})")
    except RefusedError as error:
        refused = again(error.status, error.message)
        if error.retry_after:
            refused.headers["retry-after"] = error.retry_after
        return refused
    response: Response = RedirectResponse(next_path, 303)
    if resumed:
        fields = [(name.removeprefix(_RESUME), value) for name, value in resumed]
        response = fragment(request, "resume.html", me=None, action=next_path, fields=fields)
    try:
        request.app.state.sessions.begin(response, token, is_secure=request.url.scheme == "https")
    except TokenTooLongError:
        return again(422, "A browser cannot keep so long a token: make an API key for the page.")
    return response


async def sign_out(request: Request) -> Response:
    response = RedirectResponse("/sign-in", 303)
    request.app.state.sessions.end(response)
    return response


async def require_sign_in(request: Request) -> Response:
    """The sign-in page of a visitor without a valid token; keeps the fields of a sent form."""
    is_over = request.state.token is not None
    problem = "Your sign-in has ended." if is_over else None
    if "x-part" in request.headers:  # a script's request for a part of a page, which stays
        return Response("Your sign-in has ended.", 401, media_type="text/plain")
    if request.method == "GET":
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return _form(request, 401, next_path=path, problem=problem)
    resumed = []
    if _is_kept(request):
        resumed = [(_RESUME + name, value) for name, value in await kept_fields(request)]
    if resumed and problem:
        problem += " Your entries are kept: they are sent after you have signed in."
    elif problem and not _is_kept(request):
        problem += " Your entries are too long to be kept here: go back, and copy them first."
    path = request.url.path if resumed else _page_before(request)
    return _form(request, 401, next_path=path, problem=problem, resumed=resumed)


def _is_kept(request: Request) -> bool:
    length = request.headers.get("content-length", "")
    return length.isdigit() and int(length) <= _MAX_KEPT_BYTES


def _page_before(request: Request) -> str:
    """The page of a form without fields, or of an upload, whose own address has no page."""
    before = urlsplit(request.headers.get("referer", ""))
    if before.netloc != request.headers.get("host"):
        return "/"
    return safe_path(before.path + (f"?{before.query}" if before.query else ""))


def _form(
    request: Request,
    status: int,
    next_path: str,
    problem: str | None = None,
    resumed: Sequence[tuple[str, str]] = (),
) -> Response:
    context = {"next_path": next_path, "problem": problem, "resumed": resumed}
    return fragment(request, "sign_in.html", status, me=None, **context)


routes = [
    Route(PATH, show),
    Route(PATH, submit, methods=["POST"]),
    Route("/sign-out", sign_out, methods=["POST"]),
]
