"""A check of schemathesis, which loads it by `SCHEMATHESIS_HOOKS`: no response has another team's rows."""

import json
import os
from typing import Any

import schemathesis

_FOREIGN = tuple(text.encode() for text in json.loads(os.environ["FOREIGN_TEXTS"]))


@schemathesis.check
def no_foreign_rows(
    _: schemathesis.CheckContext, response: schemathesis.Response, case: "schemathesis.Case[Any]"
) -> None:
    """Texts and ids of another team; an id that the request itself names does not count."""
    sent = repr((case.path_parameters, case.query, case.body)).encode()
    for text in _FOREIGN:
        if text in response.content and text not in sent:
            raise AssertionError(f"the response has a text of another team: {text!r}")
