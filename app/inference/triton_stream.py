"""The response stream of one generation, read to its end."""

import asyncio
import re
import struct
from collections.abc import Callable
from typing import Any

import grpc

from app.inference.triton_errors import (
    GenerationError,
    ModelFailedError,
    NotTakenError,
    StreamLostError,
    to_model_error,
)
from app.inference.triton_messages import Delta, read_response

_NOT_TAKEN = re.compile(
    r"failed to connect|resolution failed|errors resolving|Connection refused|"
    r"This protocol is restricted"  # the server has another secret
)


async def read_stream(
    call: Any, on_delta: Callable[[Delta], None], ended: "asyncio.Future[None]"
) -> None:
    """Read a call to its end; set `ended` at the last token or the first error.

    Responses after that are dropped, as are those after the consumer has cancelled `ended`.
    """
    try:
        async for response in call:
            if not ended.done():
                _on_response(response, on_delta, ended)
    except grpc.aio.AioRpcError as error:
        if not ended.done():
            ended.set_exception(to_stream_error(error))
    finally:
        if not ended.done():
            ended.set_result(None)


def _on_response(
    response: Any, on_delta: Callable[[Delta], None], ended: "asyncio.Future[None]"
) -> None:
    if response.error_message:
        ended.set_exception(to_model_error(response.error_message))
        return
    try:
        delta = read_response(response.infer_response)
    except (ValueError, struct.error) as error:
        ended.set_exception(ModelFailedError(f"The model's response cannot be read: {error}."))
        return
    try:
        on_delta(delta)
    except Exception as error:  # noqa: BLE001 - a bug must reach its owner, and not end the reading
        ended.set_exception(error)
    else:
        # Only the end of the stream follows, a round trip later.
        if delta.finish_reason is not None:
            ended.set_result(None)


def to_stream_error(error: grpc.aio.AioRpcError) -> GenerationError:
    """The error of a stream that gRPC itself ended.

    A request that kills its engine before the first token must count as an attempt, so only a failed
    connection or a wrong secret proves that the server has not taken the request.
    """
    detail = error.details() or error.code().name
    return NotTakenError(detail) if _NOT_TAKEN.search(detail) else StreamLostError(detail)
