"""Responses to a client of Triton, and the threads that send them."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
# Each send is a round trip to Triton's process, made without the interpreter lock.
SENDERS = 4


class ResponseStream:
    """Responses to one client. Triton frees a request at its final response, and asking about the
    cancellation of a freed one crashes the whole server: hence the lock and the flag."""

    def __init__(self, triton_request: Any) -> None:
        self.request_id = triton_request.request_id()
        self.sender = triton_request.get_response_sender()
        self.lock = threading.Lock()
        self.is_final = False

    def send(self, response: Any, is_final: bool = False) -> None:
        with self.lock:
            self.is_final = is_final
            self.sender.send(response, flags=FINAL if is_final else 0)

    def fail(self, code: str, message: str) -> None:
        # A stream's errors arrive as text alone (asked for status codes, Triton 2.51 crashes
        # under load), so the code's name goes first.
        error = pb_utils.TritonError(f"{code}: {message}", getattr(pb_utils.TritonError, code))
        self.send(pb_utils.InferenceResponse(error=error), is_final=True)

    def is_cancelled(self) -> bool:
        with self.lock:
            return not self.is_final and self.sender.is_cancelled()


class Senders:
    """Threads for calls to Triton."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.threads = ThreadPoolExecutor(SENDERS, thread_name_prefix="sender")

    def start(self, function: Any, *args: Any) -> asyncio.Future[Any]:
        return self.loop.run_in_executor(self.threads, function, *args)

    async def run(self, function: Any, *args: Any) -> Any:
        """Completes the call even under cancellation, so that responses keep their order."""
        call = self.start(function, *args)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait([call])
            raise

    def close(self) -> None:
        self.threads.shutdown()
