"""The token for downloads from Hugging Face, in a sealed file that only the service's account can read."""

import os
import re
import tempfile
from pathlib import Path

from app.core.sealing import SealError, seal, unseal
from app.core.settings.processes import DownloadSettings

_PURPOSE = "Hugging Face token"
_TOKEN = re.compile(r"[A-Za-z0-9_.-]{8,512}", re.ASCII)
_MODE = 0o600


class HubTokenError(Exception):
    """The token cannot be stored or read; the message is for people, and never has the token."""


class HubToken:
    """The stored token of `LLM_HUGGING_FACE_TOKEN_FILE`."""

    def __init__(self, settings: DownloadSettings) -> None:
        self._file = settings.hugging_face_token_file
        self._secret = settings.seal_secret

    def store(self, token: str) -> Path:
        """Replace the token; its file. Raises HubTokenError."""
        file, secret = self._place()
        if not _TOKEN.fullmatch(token):
            raise HubTokenError("This is not a token: letters, digits and _.- only, 8 to 512.")
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # The file has its mode from the beginning.
            handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
            try:
                with os.fdopen(handle, "wb") as target:
                    os.fchmod(target.fileno(), _MODE)
                    target.write(seal(token, secret, _PURPOSE))
                    target.flush()
                    os.fsync(target.fileno())
                Path(name).replace(file)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise HubTokenError(f"{file} cannot be written: {error.strerror}") from error
        return file

    def read(self) -> str | None:
        """The token, or None if none is stored. Raises HubTokenError."""
        if self._file is None or not self._file.exists():
            return None
        file, secret = self._place()
        try:
            return unseal(file.read_bytes(), secret, _PURPOSE)
        except OSError as error:
            raise HubTokenError(f"{file} cannot be read: {error.strerror}") from error
        except SealError:
            raise HubTokenError(
                f"{file} does not belong to this LLM_SEAL_SECRET, or was changed: store the token again "
                "with `launch token set`."
            ) from None

    def remove(self) -> bool:
        """Remove the token; False if there is none. Raises HubTokenError."""
        if self._file is None:
            return False
        try:
            self._file.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise HubTokenError(f"{self._file} cannot be removed: {error.strerror}") from error
        return True

    def _place(self) -> tuple[Path, str]:
        if self._file is None:
            raise HubTokenError(
                "LLM_HUGGING_FACE_TOKEN_FILE is not set: name a file for the token."
            )
        if self._secret is None:
            raise HubTokenError(
                "LLM_SEAL_SECRET is not set: make one with `openssl rand -base64 32`, and keep it apart "
                "from the token's file."
            )
        return self._file, self._secret.get_secret_value()
