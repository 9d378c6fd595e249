"""The service's error codes in words for people: the problem, and its remedy.

The catalogue of codes is docs/errors.md; an unknown code is shown with the API's message.
"""

from collections.abc import Mapping

REMEDIES: Mapping[str, tuple[str, str]] = {
    "cancelled": (
        "The request was stopped.",
        "Its text so far is kept. Send it again for a complete answer.",
    ),
    "deadline_exceeded": (
        "Its deadline passed before it was finished.",
        "Send it again with a longer deadline, or when the queue is shorter.",
    ),
    "engine_crashed": (
        "The inference engine died each time it ran this.",
        "Do not send it again unchanged: change prompt or parameters, and notify the operator.",
    ),
    "engine_lost": (
        "The inference engine died while this ran, and again at each further attempt.",
        "Retry once the model is ready again: see Models.",
    ),
    "not_continued": (
        "The text so far could not be continued: the next attempt started over.",
        "Nothing to do.",
    ),
    "infini_gram_error": (
        "The index failed on this text.",
        "Retry once; if it fails again, notify the operator.",
    ),
    "grammar_too_slow": (
        "The constraint took too much of the engine's time.",
        "Send a simpler one: fewer ways to read the same text, fewer alternatives.",
    ),
    "internal_error": (
        "The service has an internal error.",
        "Retry once; if it fails again, notify the operator: the log has the reason.",
    ),
    "invalid_output": (
        "The text does not follow its JSON schema.",
        "Its text is kept. Send it again; if that fails again, describe the schema in the prompt.",
    ),
    "invalid_request": (
        "The model refused the request.",
        "Change the member that the message names, then send it again.",
    ),
    "model_error": (
        "The model failed on this request.",
        "Retry; if it fails again, notify the operator.",
    ),
    "triton_lost": (
        "The connection to the Triton server broke at every attempt.",
        "Retry once the servers are healthy again: see Models.",
    ),
    "worker_lost": (
        "The process that ran it was lost, with the connection of its client.",
        "Retry: the request was not the cause.",
    ),
}


def explain(code: str, message: str) -> tuple[str, str]:
    """Tuple (problem, remedy)."""
    return REMEDIES.get(code, (message, "See the list of error codes in the documentation."))
