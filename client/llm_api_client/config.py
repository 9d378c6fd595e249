"""Address and API key: from arguments, the environment, or the file that `llm-api login` writes."""

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from llm_api_client.errors import ConfigurationError

DEFAULT_URL = "http://127.0.0.1:8887"
URL_VARIABLE = "LLM_API_URL"
KEY_VARIABLE = "LLM_API_KEY"


@dataclass(frozen=True)
class Endpoint:
    """A service and the key to it; `repr` hides the key."""

    url: str
    key: str | None

    def __repr__(self) -> str:
        return f"Endpoint({self.url!r}, {'with' if self.key else 'without'} a key)"


class _Login(msgspec.Struct):
    url: str
    key: str | None = None


def resolve(url: str | None = None, key: str | None = None) -> Endpoint:
    """The endpoint to use.

    The URL is the argument, `LLM_API_URL`, that of the last login, or http://127.0.0.1:8887. The key is the
    argument, `LLM_API_KEY`, or that of the last login at the same URL.

    Raises:
        ConfigurationError: the URL is not http(s), or the key has blanks or other control characters.
    """
    login = read_login()
    url = url or os.environ.get(URL_VARIABLE) or (login.url if login else DEFAULT_URL)
    url = checked_url(url)
    key = key or os.environ.get(KEY_VARIABLE)
    if not key and login is not None and login.url == url:
        key = login.key
    return Endpoint(url, checked_key(key) if key else None)


def checked_url(url: str) -> str:
    """The URL without a slash at its end."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(
            f"{url!r} is not a URL like {DEFAULT_URL} or https://llm.example.org."
        )
    if parts.query or parts.fragment or parts.username:
        raise ConfigurationError("The URL of the service has no user, query or fragment.")
    return url.rstrip("/")


def checked_key(key: str) -> str:
    """The key without blanks around it."""
    key = key.strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigurationError("The API key has blanks or characters that no key has.")
    return key


def login_file() -> Path:
    """The file of the last login: `llm-api/login.json` in the user's configuration directory."""
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "llm-api" / "login.json"


def read_login() -> Endpoint | None:
    """The last login; None if there is none."""
    try:
        stored = msgspec.json.decode(login_file().read_bytes(), type=_Login)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError, RuntimeError) as error:
        raise ConfigurationError(
            f"{login_file()} cannot be read ({error}): run `llm-api login` again."
        ) from error
    return Endpoint(stored.url, stored.key)


def write_login(endpoint: Endpoint) -> Path:
    """Store a login, readable by the user alone."""
    file = login_file()
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = file.with_suffix(f".{os.getpid()}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(msgspec.json.encode(_Login(endpoint.url, endpoint.key)))
    new.replace(file)
    return file
