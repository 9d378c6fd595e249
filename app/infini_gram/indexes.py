"""The open indexes of a process, by name, and the threads for their queries.

An index that fails its checks is not opened, and the others are: its queries get a 503 with the
reason. A big index opens when its sizes are right, and its checksums are computed in the background;
if one is wrong, the index is closed again.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from app.core.background_threads import background_threads
from app.core.errors import EngineError, IndexBusyError, IndexUnavailableError, UnknownIndexError
from app.core.waiting import cancel_all
from app.infini_gram import manifest as manifests
from app.infini_gram.declarations import Declaration, DeclarationError, read_declarations
from app.infini_gram.engine import Engine
from app.infini_gram.manifest import ManifestError
from app.infini_gram.reduced_engine import open_engine
from app.infini_gram.thread_budget import ThreadBudget
from app.infini_gram.tokenizer import TokenizerError

logger = logging.getLogger(__name__)

# Unverified bytes that are read before an index is opened, at most: some seconds.
CHECK_FIRST_BYTES = 2_000_000_000
# Between two looks at the file of declarations.
WATCH_SECONDS = 2.0

_T = TypeVar("_T")
_Version = tuple[object, ...]


class _StoppedError(Exception):
    """The process ends in the middle of a check."""


class Indexes:
    """Open indexes: at most `threads` queries run at the same time, and `queue` more wait.

    `budget` is for threads that the engine starts for them. Indexes that are added to `file` later are opened,
    too, and those whose directories are replaced are opened again.
    """

    def __init__(
        self,
        declarations: Sequence[Declaration],
        *,
        threads: int = 4,
        queue: int = 64,
        budget: ThreadBudget | None = None,
        file: Path | None = None,
    ) -> None:
        self._declarations = {one.name: one for one in declarations}
        self._versions: dict[str, _Version] = {}  # that were last opened, or tried
        self._engines: dict[str, Engine] = {}
        self._failures: dict[str, str] = {}
        self._budget = budget or ThreadBudget()
        self._pool = background_threads("infini-gram", threads)
        self._most = threads + queue
        self._pending = 0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._checkers: list[threading.Thread] = []
        self._file = file
        self._watcher: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Verify and open all indexes; failures are logged and kept."""
        await asyncio.to_thread(self.open_blocking)

    def open_blocking(self) -> None:
        self._check_in_background([one for one in self._declarations.values() if self._open(one)])

    def open_changed(self, declared: Sequence[Declaration], *, also_closed: bool = False) -> None:
        """Open those that are declared otherwise, or whose manifests were replaced since they were last tried.

        With `also_closed`, all that are not open are tried again.
        """
        changed = [
            one
            for one in declared
            if self._versions.get(one.name) != _version_of(one)
            or (also_closed and one.name not in self._engines)
        ]
        self._declarations = {**self._declarations, **{one.name: one for one in changed}}
        with contextlib.suppress(_StoppedError):
            self._check_in_background([one for one in changed if self._open(one)])

    def _check_in_background(self, later: list[Declaration]) -> None:
        if later:
            checker = threading.Thread(
                target=self._check_later, args=(later,), name="index checksums", daemon=True
            )
            self._checkers.append(checker)
            checker.start()

    async def __aenter__(self) -> "Indexes":
        seen = self._look()
        await self.open()
        if self._file is not None:
            self._watcher = asyncio.create_task(
                self._watch(self._file, seen), name="index declarations"
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping.set()
        if self._watcher:
            await cancel_all([self._watcher])
        self.close()

    def close(self) -> None:
        self._stopping.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for checker in self._checkers:
            checker.join()
        self._engines.clear()

    @property
    def names(self) -> list[str]:
        """Indexes that accept queries, in the order of their declaration."""
        return [name for name in self._declarations if name in self._engines]

    @property
    def failures(self) -> dict[str, str]:
        """The reasons of the others, by name; only the log has the files' paths."""
        return {name: why for name, why in self._failures.items() if name not in self._engines}

    def engine(self, name: str) -> Engine:
        """Raises UnknownIndexError, IndexUnavailableError."""
        engine = self._engines.get(name)
        if engine is not None:
            return engine
        if name in self._declarations:
            reason = self._failures.get(name, "it is not open")
            raise IndexUnavailableError(f"Index {name!r} cannot be used: {reason}.")
        raise UnknownIndexError(
            f"There is no index {name[:200]!r}. There are: {', '.join(self.names) or 'none'}.",
            extra={"known_indexes": self.names},
        )

    async def run(self, name: str, call: Callable[[Engine], _T]) -> _T:
        """Run a call of the index's engine on a thread.

        Raises the errors of `engine` and of the call, and IndexBusyError when too many calls wait. When the
        caller is cancelled, a call that has begun still runs to its end and keeps its slot until then.
        """
        engine = self.engine(name)
        with self._lock:
            if self._pending >= self._most:
                raise IndexBusyError(
                    f"{self._most} queries run or wait already. Try again.",
                    headers={"Retry-After": "1"},
                )
            self._pending += 1
        try:
            future = self._pool.submit(call, engine)
        except RuntimeError:  # the pool is shut down
            self._release()
            raise IndexUnavailableError("The process is stopping.") from None
        future.add_done_callback(self._release)
        return await asyncio.wrap_future(future)

    def _release(self, _: "Future[_T] | None" = None) -> None:
        with self._lock:
            self._pending -= 1

    # --- Declarations that are added later, directories that are replaced ---------------------------

    async def _watch(self, file: Path, seen: tuple[_Version | None, ...]) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                found = await asyncio.to_thread(self._look)
                if found != seen and found[0] is not None:
                    seen = found
                    await asyncio.to_thread(self._open_declared, file)
            except Exception:
                logger.exception("%s", file, extra={"action": "index_failed"})

    def _look(self) -> tuple[_Version | None, ...]:
        """Versions of the file, first, and of the indexes that were declared when it was last read."""
        versions = (_version_of(one) for one in self._declarations.values())
        return _stamp(self._file), *versions

    def _open_declared(self, file: Path) -> None:
        """Open what the file declares now. Indexes stay open if it no longer declares them."""
        try:
            declared = read_declarations(file)
        except DeclarationError as error:
            extra = {"action": "index_failed"}
            logger.error("the indexes stay as they are: %s", error, extra=extra)  # noqa: TRY400
            return
        self.open_changed(declared, also_closed=True)

    # --- Opening ----------------------------------------------------------------------------------

    def _open(self, declaration: Declaration) -> bool:
        """Open one index; return whether its checksums are still to be computed."""
        begun = time.monotonic()
        self._versions[declaration.name] = _version_of(declaration)
        try:
            for path in declaration.all_paths:
                manifests.verify(path, checksums=False)
            is_later = _unverified_bytes(declaration) > CHECK_FIRST_BYTES
            if not is_later:
                self._check(declaration)
            self._engines[declaration.name] = engine = open_engine(declaration, self._budget)
            self._failures.pop(declaration.name, None)
        except (ManifestError, TokenizerError, EngineError, OSError) as error:
            self._fail(declaration, error)
            return False
        logger.info(
            "index %s is open: %d documents, %d tokens (%.2f s)%s",
            declaration.name,
            engine.total_documents,
            engine.total_tokens,
            time.monotonic() - begun,
            "; its checksums are being computed" if is_later else "",
            extra={"action": "index_open"},
        )
        return is_later

    def _check(self, declaration: Declaration) -> None:
        def report(_done: int, _total: int) -> None:
            if self._stopping.is_set():
                raise _StoppedError

        for path in declaration.all_paths:
            manifest = manifests.read(path)
            if names := manifests.unverified(path, manifest):
                manifests.check_contents(path, manifest, names, report)
                manifests.remember_verified(path, manifest)

    def _check_later(self, declarations: list[Declaration]) -> None:
        for declaration in declarations:
            engine = self._engines.get(declaration.name)
            try:
                self._check(declaration)
            except _StoppedError:
                return
            except (ManifestError, OSError) as error:
                # If it was replaced meanwhile, the files were partly those of the engine that is open now.
                if self._engines.get(declaration.name) is engine:
                    self._engines.pop(declaration.name, None)
                    self._fail(declaration, error)

    def _fail(self, declaration: Declaration, error: Exception) -> None:
        self._failures[declaration.name] = _without_paths(str(error), declaration).rstrip(".")
        extra = {"action": "index_failed"}
        logger.error("index %s is not open: %s", declaration.name, error, extra=extra)


def _version_of(declaration: Declaration) -> _Version:
    """Changes when the index is declared otherwise, or one of its manifests is written or replaced."""
    return declaration, *(_stamp(path / manifests.MANIFEST) for path in declaration.all_paths)


def _stamp(file: Path | None) -> tuple[int, ...] | None:
    """Changes when the file is written or replaced; None if it cannot be read."""
    try:
        status = file.stat() if file else None
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_size, status.st_ino) if status else None


def _unverified_bytes(declaration: Declaration) -> int:
    found = ((path, manifests.read(path)) for path in declaration.all_paths)
    return sum(
        manifest.files[name].size
        for path, manifest in found
        for name in manifests.unverified(path, manifest)
    )


def _without_paths(reason: str, declaration: Declaration) -> str:
    for path in sorted(declaration.all_paths, key=str, reverse=True):  # "a.removed" before "a"
        reason = reason.replace(f"{path}/", "").replace(str(path), "its folder")
    return reason.replace(declaration.tokenizer, Path(declaration.tokenizer).name)
