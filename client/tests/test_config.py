"""URL and key: arguments, environment, login; keys that must not leave."""

import socket
import stat
from pathlib import Path

import pytest

from llm_api_client import Client
from llm_api_client.config import (
    DEFAULT_URL,
    Endpoint,
    login_file,
    read_login,
    resolve,
    write_login,
)
from llm_api_client.errors import ConfigurationError, ConnectionFailedError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("LLM_API_URL", raising=False)
    monkeypatch.delenv("LLM_API_KEY", raising=False)


def test_the_order_of_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve() == Endpoint(DEFAULT_URL, None)
    write_login(Endpoint("https://a.example", "stored"))
    assert resolve() == Endpoint("https://a.example", "stored")
    monkeypatch.setenv("LLM_API_KEY", "variable")
    monkeypatch.setenv("LLM_API_URL", "https://b.example/")
    assert resolve() == Endpoint("https://b.example", "variable")
    assert resolve("https://c.example:1", "given") == Endpoint("https://c.example:1", "given")


def test_a_stored_key_goes_to_its_own_service_only() -> None:
    write_login(Endpoint("https://a.example", "stored"))
    assert resolve("https://evil.example").key is None
    assert resolve("https://a.example/").key == "stored"


def test_the_login_is_private() -> None:
    write_login(Endpoint("https://a.example", "first"))
    file = write_login(Endpoint("https://a.example", "second"))
    assert file == login_file()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [one.name for one in file.parent.iterdir()] == [file.name]
    assert read_login() == Endpoint("https://a.example", "second")


def test_a_damaged_login_is_named() -> None:
    write_login(Endpoint("https://a.example", None)).write_text("{")
    with pytest.raises(ConfigurationError, match="run `llm-api login` again"):
        resolve()


@pytest.mark.parametrize(
    "url", ["localhost:8887", "ftp://x", "http://", "http://a?x=1", "http://u:p@a"]
)
def test_wrong_urls(url: str) -> None:
    with pytest.raises(ConfigurationError):
        resolve(url)


@pytest.mark.parametrize("key", ["a b", "a\nb", "schlüssel", "\x00"])
def test_wrong_keys(key: str) -> None:
    with pytest.raises(ConfigurationError):
        resolve(key=key)


HTTP = "http://llm.example"


@pytest.mark.parametrize(
    "url", [HTTP, "http://10.0.0.1:8887", "http://localhost.example", "http://127.0.0.1.example"]
)
def test_a_key_does_not_cross_a_network_in_the_clear(url: str) -> None:
    with pytest.raises(ConfigurationError, match="LLM_API_ALLOW_HTTP=1"):
        resolve(url, "key")
    assert resolve(url).key is None  # without a key, nothing is at stake
    assert resolve(url, "key", allow_http=True).key == "key"


@pytest.mark.parametrize(
    "host", ["https://llm.example", "http://127.8.0.1", "http://[::1]:1", "http://LOCALHOST:1"]
)
def test_a_key_that_is_encrypted_or_stays_on_its_host(host: str) -> None:
    assert resolve(host, "key").key == "key"


def test_plain_http_is_allowed_by_the_environment_or_a_login(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_login(Endpoint(HTTP, "stored", allow_http=True))
    assert resolve(HTTP).key == "stored"
    with pytest.raises(ConfigurationError):
        resolve("http://other.example", "key")
    monkeypatch.setenv("LLM_API_ALLOW_HTTP", "1")
    assert resolve("http://other.example", "key").key == "key"


def test_no_proxy_gets_what_stays_on_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        with (
            Client("http://127.0.0.1:9", "key", patience=0, timeout=1) as client,
            pytest.raises(ConnectionFailedError),
        ):
            client.me()
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()


def test_a_key_is_not_shown() -> None:
    assert "hidden" not in repr(Endpoint("http://a", "hidden"))
