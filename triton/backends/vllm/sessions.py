"""The open sessions of one model, and the messages to them."""

from functools import partial
from typing import Any

from engine_requests import EngineRequests
from response_stream import ResponseStream, Senders
from session import Session, check_collector
from session_messages import Command, MessageError, Open, read_commands

MAX_ID_LENGTH = 64


class Sessions:
    """The open sessions of a model by their ids."""

    def __init__(self, requests: EngineRequests, senders: Senders) -> None:
        check_collector()
        self.requests = requests
        self.senders = senders
        self.open: dict[str, Session] = {}

    @property
    def generations(self) -> int:
        return sum(len(session.slots) for session in self.open.values())

    def submit(self, triton_request: Any, stream: ResponseStream) -> None:
        """Called on Triton's thread, in the order of the messages."""
        try:
            session_id, commands = read_message(triton_request)
        except MessageError as error:
            stream.fail("INVALID_ARG", str(error))
            return
        self.requests.host.loop.call_soon_threadsafe(self.run, session_id, commands, stream)

    def run(self, session_id: str, commands: list[Command], stream: ResponseStream) -> None:
        """Runs all commands of a message, or none and answers it with an error."""
        session = self.open.get(session_id)
        try:
            if session is None:
                self.start(session_id, commands, stream)
                return
            session.check(commands)
        except MessageError as error:
            self.senders.start(stream.fail, "INVALID_ARG", f"session {session_id!r}: {error}")
            return
        session.run(commands)
        self.senders.start(stream.send, None, True)

    def start(self, session_id: str, commands: list[Command], stream: ResponseStream) -> None:
        if not commands or not isinstance(commands[0], Open):
            raise MessageError("not open")
        forget = partial(self.open.pop, session_id)
        session = Session(commands[0], stream, self.requests, self.senders, forget)
        session.check(commands[1:])
        self.open[session_id] = session
        session.start()
        session.run(commands[1:])


def read_message(triton_request: Any) -> tuple[str, list[Command]]:
    inputs = {tensor.name(): tensor.as_numpy().reshape(-1) for tensor in triton_request.inputs()}
    session_id = bytes(inputs["session_v1"][0]).decode("utf-8", "replace")
    if not 0 < len(session_id) <= MAX_ID_LENGTH:
        raise MessageError(f"session_v1 must have 1 to {MAX_ID_LENGTH} characters")
    if "session_commands" not in inputs:
        raise MessageError("session_commands is required with session_v1")
    return session_id, read_commands(inputs["session_commands"])
