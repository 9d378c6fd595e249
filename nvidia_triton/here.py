"""Checks of this machine that run before billing starts."""

import errno
import os
import pwd
import re
import socket
from pathlib import Path

from nvidia_triton.definition import InputError
from nvidia_triton.progress import say
from nvidia_triton.vast import PROGRAM, clean

MAX_NAMES = 5  # in one line
_MODEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")
# ssh expands these in the name of a key.
_NOT_IN_KEY = re.compile(r"""[%$"'\\\x00-\x1f]""")


def check_port(address: str, port: int) -> None:
    """Raise InputError if the port cannot be opened at this address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise InputError(f"tunnels_address: this machine has no {address}.") from error
            raise InputError(taken(address, str(port))) from error


def models_in(folder: Path) -> list[str]:
    """The models of a repository here; raises InputError if there is none."""
    if not folder.is_dir():
        raise InputError(f"models: {str(folder)!a} is no folder.")
    names, left_out = [], []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or not path.is_dir():
            continue
        if not (path / "config.pbtxt").is_file():
            left_out.append(clean(path.name))
        elif not _MODEL.fullmatch(path.name):
            raise InputError(f"models: {path.name!a} is no name for a model.")
        else:
            names.append(path.name)
    if left_out:
        shown = ", ".join(left_out[:MAX_NAMES])
        more = f" and {len(left_out) - MAX_NAMES} more" if len(left_out) > MAX_NAMES else ""
        say(f"Left out, without a config.pbtxt: {shown}{more}")
    if not names:
        raise InputError(f"models: there is no model in {str(folder)!a}.")
    return names


def find_key(key: Path | None) -> Path | None:
    """The private key to log in with, or None for ssh's own; raises InputError if there is none."""
    if key is not None:
        if _NOT_IN_KEY.search(str(key)):
            raise InputError("PRIVATE_SSH_KEY: must be a path without quotes, % and $.")
        if not key.is_file():
            raise InputError(f"PRIVATE_SSH_KEY: there is no file {str(key)!a}.")
        return key
    if "SSH_AUTH_SOCK" not in os.environ and not any(_own_keys().glob("id_*")):
        raise InputError(
            "You have no ssh key: `ssh-keygen -t ed25519`, register it at Vast.ai "
            f'(`{PROGRAM} create ssh-key "$(cat ~/.ssh/id_ed25519.pub)"`), or name one with '
            "PRIVATE_SSH_KEY=FILE."
        )
    return None


def _own_keys() -> Path:
    """Directory of ssh's keys: by the system's user database, not HOME."""
    return Path(pwd.getpwuid(os.getuid()).pw_dir) / ".ssh"


def taken(address: str, port: str) -> str:
    """Message for a port in use, with the remedy."""
    return (
        f"Port {port} of {address} is taken: end what listens there, or choose others with "
        "HTTP_PORT=, GRPC_PORT= and METRICS_PORT=."
    )
