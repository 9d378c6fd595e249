"""/docs/errors: what each error code means; the `type` of every problem points here."""

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse

router = APIRouter(include_in_schema=False)

_CATALOGUE = Path(__file__).parents[2] / "docs" / "errors.md"


@router.get("/docs/errors")
async def read_errors() -> FileResponse:
    """Show the catalogue as it is in the repository: it is written to be read as text."""
    return FileResponse(_CATALOGUE, media_type="text/plain; charset=utf-8")
