"""Attribution of texts to a corpus (infini-gram indexes)."""

from typing import Any
from urllib.parse import quote

from llm_api_client.operations.results import ResultOrId, new_key, path_of
from llm_api_client.schemas import Attribution, Result
from llm_api_client.steps import Call, Request, fetch

_MAX_SECONDS = 120.0


def indexes() -> Call[list[str]]:
    """The names of the indexes."""
    return (yield from fetch(Request("GET", "/indexes"), list[str]))


def of_text(text: str, *, index: str, **options: Any) -> Call[Attribution]:
    """Find the parts of a text that a corpus contains, with the documents that contain them.

    Args:
        text: at most 100,000 characters.
        index: the corpus.
        options: as in `POST /{index}/attribution`, such as `minimumSpanLength` or `maximumFrequency`.

    Raises:
        ServiceUnavailableError: `server_overloaded`: it took too long.
    """
    request = Request(
        "POST",
        f"/{quote(index, safe='')}/attribution",
        json={"response": text, **options},
        headers={"Idempotency-Key": new_key()},
        timeout=_MAX_SECONDS,
    )
    return (yield from fetch(request, Attribution))


def of_result(result: ResultOrId, *, index: str, wait: float = 0, **options: Any) -> Call[Result]:
    """Attribute the text of a completed result: a new result, whose `result` is the attribution.

    The same call again returns the same result.

    Args:
        result: a completed result or its id.
        index: the corpus.
        wait: seconds to wait for the end in the same request, at most 60.
        options: as in `of_text`.

    Raises:
        ConflictError: the text is not complete.
    """
    request = Request(
        "POST",
        f"{path_of(result)}/attribution",
        {"index": index},
        json=options,
        headers={"Prefer": f"wait={wait:.0f}"} if wait else {},
        timeout=wait + 15 if wait else None,
    )
    return (yield from fetch(request, Result))
