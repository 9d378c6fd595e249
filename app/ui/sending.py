"""Forms: reading the fields, and sending them once."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import FormData
from starlette.requests import Request

# The guard bounds the whole of a form: a field may be all of it.
_MAX_FIELD_BYTES = 2**40


async def read_form(request: Request) -> FormData:
    return await request.form(max_files=0, max_part_size=_MAX_FIELD_BYTES)


async def kept_fields(request: Request) -> list[tuple[str, str]]:
    """The fields to be sent again; none of an upload, which is not kept."""
    is_upload = request.headers.get("content-type", "").startswith("multipart/")
    if request.method != "POST" or is_upload:
        return []
    return fields_of(await read_form(request))


def fields_of(form: FormData) -> list[tuple[str, str]]:
    return [(name, value) for name, value in form.multi_items() if isinstance(value, str)]


def texts_of(form: FormData) -> dict[str, str]:
    """The fields with their texts: browsers send the ends of lines as CR LF."""
    return {
        name: value.replace("\r\n", "\n") for name, value in form.items() if isinstance(value, str)
    }


def key_of(form_key: str, body: Mapping[str, Any]) -> str:
    """An idempotency key: the same form with the same entries is one result, however often sent."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    printable = "".join(one for one in form_key[:64] if one.isascii() and one.isalnum())
    return f"page-{printable}-{digest[:32]}"
