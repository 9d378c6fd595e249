"""The ways in which a generation can end early, and what a model's error message means."""

import re


class GenerationError(Exception):
    """The base of all ways in which a generation can end without its last token."""


class NotTakenError(GenerationError):
    """Triton could not be reached, or its model is not ready: nothing ran."""


class ModelDeadError(NotTakenError):
    """The model's process is gone although Triton calls it ready.

    Triton leaves the streams that were open to it hanging for ever: whoever holds some must stop
    them (measured with Triton 2.51).
    """


class StreamLostError(GenerationError):
    """Triton may have taken the request, then the stream broke: the server or its engine died."""


class RefusedError(GenerationError):
    """The model refused the request itself."""


class ModelFailedError(GenerationError):
    """The model reported an error while it ran the request."""


# A failed stream's cause comes as text: the header that asks Triton 2.51 for status codes
# (`triton_grpc_error`) makes it crash under load. Our backends put the code's name first;
# the rest are Triton's and gRPC's own words.
_CODED = re.compile(r"(INVALID_ARG|UNAVAILABLE|INTERNAL): (.*)", re.DOTALL)
_NOT_SERVED = re.compile(r"unknown model|not at ready state|is not ready|no available versions")
_DEAD = re.compile(r"Stub process .* is not healthy")


def to_model_error(message: str) -> GenerationError:
    """What an error message inside a response means."""
    message = message.replace("\x00", "\ufffd")  # PostgreSQL's text cannot hold NUL
    coded = _CODED.match(message)
    if coded:  # whatever follows is the model's, and may quote the prompt
        kinds = {"INVALID_ARG": RefusedError, "UNAVAILABLE": StreamLostError}
        return kinds.get(coded[1], ModelFailedError)(coded[2])
    if _DEAD.search(message):
        return ModelDeadError(message)
    if _NOT_SERVED.search(message):
        return NotTakenError(message)
    return ModelFailedError(message)
