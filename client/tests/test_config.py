"""URL and key: arguments, environment, login; keys that must not leave."""

import stat
from pathlib import Path

import pytest

from llm_api_client.config import (
    DEFAULT_URL,
    Endpoint,
    login_file,
    read_login,
    resolve,
    write_login,
)
from llm_api_client.errors import ConfigurationError


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
    assert resolve("http://c.example:1", "given") == Endpoint("http://c.example:1", "given")


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


def test_a_key_is_not_shown() -> None:
    assert "hidden" not in repr(Endpoint("http://a", "hidden"))
