"""The service's error codes in words for people: what happened, and what to do about it.

The catalogue of codes is docs/errors.md; a code that is not here is shown with the API's message.
"""

from collections.abc import Mapping

WORDS: Mapping[str, tuple[str, str]] = {
    "cancelled": ("It was stopped.", "Its text so far is kept. Send it again for a whole answer."),
    "deadline_exceeded": (
        "Its time was over before it was finished.",
        "Send it again with a longer deadline, or when the queue is shorter.",
    ),
    "engine_crashed": (
        "The inference engine died each time it ran this.",
        "Do not send it again as it is: change prompt or parameters, and tell the operator.",
    ),
    "engine_lost": (
        "The inference engine died while this ran, and again at each further attempt.",
        "Retry once the model is ready again: Models tells.",
    ),
    "not_continued": (
        "The text so far could not be continued: the next attempt started over.",
        "Nothing to do.",
    ),
    "infini_gram_error": (
        "The index failed on this text.",
        "Retry once; if it fails again, tell the operator.",
    ),
    "internal_error": (
        "The service made a mistake.",
        "Retry once; if it fails again, tell the operator: the log has the reason.",
    ),
    "invalid_request": (
        "The model refused the request.",
        "Change what the message names, then send it anew.",
    ),
    "model_error": (
        "The model failed on this request.",
        "Retry; if it fails again, tell the operator.",
    ),
    "triton_lost": (
        "The connection to the Triton server broke at every attempt.",
        "Retry once the servers are well again: Models tells.",
    ),
    "worker_lost": (
        "The process that ran it was lost, with the client that waited.",
        "Retry: nothing was wrong with the request.",
    ),
}


def explain(code: str, message: str) -> tuple[str, str]:
    """(what happened, what to do)."""
    return WORDS.get(code, (message, "See the list of error codes in the documentation."))
