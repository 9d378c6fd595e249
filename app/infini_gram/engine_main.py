"""An index's engine in its own process: `python -m app.infini_gram.engine_main FILE NAME PARENT`.

Attributions run here. A call of the engine cannot be interrupted, and hostile input may crash it: only
this process is killed, or dies. It reads requests from stdin and answers on stdout, one at a time;
`process` is the other end.

A request is a line of JSON, {"text", "parameters"}. A response is a line of JSON, {"kind", "size",
"tokens", "version"}, followed by `size` bytes: the attribution as JSON ("ok"), or a message
("invalid", "engine", "bug"). The first response reports that the index is open.
"""

import contextlib
import ctypes
import logging
import os
import signal
import sys
from pathlib import Path
from typing import IO

import orjson

from app.core.errors import EngineInputError, InvalidRequestError, ServiceError
from app.infini_gram.attribution import AttributionParameters, attribute
from app.infini_gram.declarations import Declaration, DeclarationError, read_declarations
from app.infini_gram.indexes import Indexes

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_NICENESS = 19


def main(file: Path, name: str, parent: int) -> None:
    _end_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # sent to the group: the worker finishes its work
    _lower_priority()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of the engine must not mix with the responses
    try:
        indexes = _open(file, name)
    except (DeclarationError, ServiceError) as error:
        _answer(answers, "engine", str(error).encode())
        return
    _answer(answers, "ok", b"")
    for line in sys.stdin.buffer:
        with contextlib.suppress(DeclarationError):  # the API's log has it
            indexes.open_changed(_declared(file, name))
        _answer(answers, *_attribute(indexes, name, line))


def _open(file: Path, name: str) -> Indexes:
    indexes = Indexes(_declared(file, name))
    indexes.open_blocking()
    indexes.engine(name)
    return indexes


def _declared(file: Path, name: str) -> list[Declaration]:
    """The index's declaration alone. Raises DeclarationError."""
    declared = read_declarations(file)
    if name not in (one.name for one in declared):
        known = ", ".join(one.name for one in declared) or "none"
        raise DeclarationError(f"{file} declares no index {name!r}; there are: {known}")
    return [one for one in declared if one.name == name]


def _attribute(indexes: Indexes, name: str, line: bytes) -> tuple[str, bytes, int, int]:
    try:
        request = orjson.loads(line)
        parameters = AttributionParameters.model_validate(request["parameters"])
        # Looked up each time: a big index is closed if its checksums turn out to be wrong.
        engine = indexes.engine(name)
        found = attribute(engine, parameters, request["text"])
    except (InvalidRequestError, EngineInputError) as error:
        return "invalid", error.detail.encode(), 0, 0
    except ServiceError as error:
        return "engine", error.detail.encode(), 0, 0
    except Exception:
        logger.exception("an attribution broke")
        return "bug", b"", 0, 0
    return "ok", orjson.dumps(found), len(found["inputTokens"]), engine.version


def _answer(answers: IO[bytes], kind: str, body: bytes, tokens: int = 0, version: int = 0) -> None:
    head = {"kind": kind, "size": len(body), "tokens": tokens, "version": version}
    answers.write(orjson.dumps(head) + b"\n")
    answers.write(body)
    answers.flush()


def _lower_priority() -> None:
    """Leave one processor of several to other processes, and take low priority on the rest.

    The other processes of the host serve waiting clients. Niceness counts within a session only, and
    Linux weighs sessions against each other (autogroups, `sched(7)`), so the engine has its own session
    with its own niceness. Eight engines on two processors at normal priority made a poll's p99 13 times
    what it is without engines (docs/benchmarks.md, NGRAM).
    """
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) > 1:
        os.sched_setaffinity(0, processors[1:])
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):  # a kernel without autogroups, a read-only /proc
        Path("/proc/self/autogroup").write_text(str(_NICENESS))


def _end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the worker dies: another worker repeats its work."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that
        sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
