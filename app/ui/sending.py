"""What forms that send prompts have in common."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import FormData


def texts_of(form: FormData) -> dict[str, str]:
    """The fields with what was entered: browsers send the ends of lines as CR LF."""
    return {
        name: value.replace("\r\n", "\n") for name, value in form.items() if isinstance(value, str)
    }


def key_of(form_key: str, body: Mapping[str, Any]) -> str:
    """An idempotency key: the same form with the same entries is one result, however often sent."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    printable = "".join(one for one in form_key[:64] if one.isalnum())
    return f"page-{printable}-{digest[:32]}"
