"""/docs/errors: the catalogue of error codes; the `type` of every problem links here."""

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse

router = APIRouter(include_in_schema=False)

_CATALOGUE = Path(__file__).parents[2] / "docs" / "errors.md"


@router.get("/docs/errors")
async def read_errors() -> FileResponse:
    """Return the catalogue as plain text."""
    return FileResponse(_CATALOGUE, media_type="text/plain; charset=utf-8")
