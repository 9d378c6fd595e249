"""Address and API key: from arguments, the environment, or the file that `llm-api login` writes."""

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from llm_api_client.errors import ConfigurationError

DEFAULT_URL = "http://127.0.0.1:8887"
URL_VARIABLE = "LLM_API_URL"
KEY_VARIABLE = "LLM_API_KEY"
HTTP_VARIABLE = "LLM_API_ALLOW_HTTP"


@dataclass(frozen=True)
class Endpoint:
    """A service and the key to it; `repr` hides the key."""

    url: str
    key: str | None
    # Whether the key may cross a network without encryption.
    allow_http: bool = False

    def __repr__(self) -> str:
        return f"Endpoint({self.url!r}, {'with' if self.key else 'without'} a key)"


class _Login(msgspec.Struct, omit_defaults=True):
    url: str
    key: str | None = None
    allow_http: bool = False


def resolve(
    url: str | None = None, key: str | None = None, *, allow_http: bool = False
) -> Endpoint:
    """The endpoint to use.

    The URL is the argument, `LLM_API_URL`, that of the last login, or http://127.0.0.1:8887. The key is the
    argument, `LLM_API_KEY`, or that of the last login at the same URL.

    Args:
        url: of the service.
        key: of the caller.
        allow_http: send the key to another host than this one over plain http, where anyone on the way
            can read it. So do `LLM_API_ALLOW_HTTP=1`, and a login that allowed it.

    Raises:
        ConfigurationError: the URL is not http(s), the key has blanks or other control characters, or would
            cross a network without encryption.
    """
    login = read_login()
    url = url or os.environ.get(URL_VARIABLE) or (login.url if login else DEFAULT_URL)
    url = checked_url(url)
    key = key or os.environ.get(KEY_VARIABLE)
    if login is not None and login.url == url:
        key = key or login.key
        allow_http = allow_http or login.allow_http
    allow_http = allow_http or os.environ.get(HTTP_VARIABLE) == "1"
    key = checked_key(key) if key else None
    is_private = urlsplit(url).scheme == "https" or is_local(url)
    if key and not allow_http and not is_private:
        raise ConfigurationError(
            f"The API key would be readable on the way to {url}: use an https URL. In a network that you "
            f"trust, set {HTTP_VARIABLE}=1, or give allow_http=True (command: --allow-http)."
        )
    return Endpoint(url, key, allow_http)


def is_local(url: str) -> bool:
    """True if the host of a URL is this one: no network is in between."""
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
    return Endpoint(stored.url, stored.key, stored.allow_http)


def write_login(endpoint: Endpoint) -> Path:
    """Store a login, readable by the user alone."""
    file = login_file()
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = file.with_suffix(f".{os.getpid()}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(msgspec.json.encode(_Login(endpoint.url, endpoint.key, endpoint.allow_http)))
    new.replace(file)
    return file
