"""Files that survive a crash, and are written by one process at a time."""

import contextlib
import errno
import os
import socket
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# A file system without locks, as some of clusters are mounted.
_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})
_HOLDER_BYTES = 500


class FileLock:
    """A lock that ends with its process, however that ends. The file at `path` names the holder.

    The holder removes the file. So a process that has locked it looks whether it is still there: otherwise
    another one may have locked its successor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None

    def take(self) -> str | None:
        """Lock it; returns the holder if there is another one, which may be of this process."""
        while True:
            file = self.path.open("a+b", buffering=0)
            try:
                if not _lock(file.fileno(), self.path):
                    file.seek(0)
                    holder = file.read(_HOLDER_BYTES).decode(errors="replace")
                    file.close()
                    return holder or "another process"
                if self._is_present(file.fileno()):
                    break
                file.close()
            except BaseException:
                file.close()
                raise
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        self._file = file
        return None

    def _is_present(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self.path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
            self._file.close()
            self._file = None


def _lock(descriptor: int, path: Path) -> bool:
    """Lock an open file; False if another one has."""
    try:
        if fcntl is None:
            raise OSError(errno.ENOSYS, "no locks")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            f"{path.parent} has no locks: start no second process that writes this file of answers.",
            stacklevel=2,
        )
    return True


def replace(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file at once: a reader sees the old lines or the new ones, also after a crash."""
    new = path.with_name(path.name + ".new")
    with new.open("wb") as file:
        file.writelines(lines)
    publish(new, path)


def publish(new: Path, path: Path) -> None:
    """Give a new file the name of another one, once it is on the disk."""
    with new.open("rb+") as file:
        os.fsync(file.fileno())
    new.replace(path)
    sync_names(path.parent)


def sync_names(directory: Path) -> None:
    """Wait until the names of files in a directory are on the disk, where that is possible."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
