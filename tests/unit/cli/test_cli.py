"""The command line: help, wrong settings by name, and an API that is not for everyone."""

from pathlib import Path

import pytest

from app.cli.main import _COMMANDS, main
from tests.unit.core.test_settings import ALIASES, REQUIRED


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ALIASES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for command in ("up", "serve", "worker", "migrate", "team", "token", "index", "plan"):
        assert f"\n    {command} " in text


@pytest.mark.parametrize("command", _COMMANDS)
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: python -m app {command} " in capsys.readouterr().out


@pytest.mark.parametrize(("command", "module"), [("up", "app.cli.nothing"), ("serve", "nothing")])
def test_a_fault_of_an_installation_keeps_its_traceback(
    command: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_COMMANDS, command, (module, "text"))
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        main([command])


@pytest.mark.parametrize("arguments", [[], ["fly"], ["serve", "--fast"], ["up", "--port", "x"]])
def test_wrong_arguments_end_with_two(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "worker", "migrate"])
def test_missing_settings_are_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(REQUIRED)
    for name, line in zip(sorted(REQUIRED), sorted(lines), strict=True):
        assert name in line
        assert "docs/settings.md" in line


def test_a_wrong_setting_is_named(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (REQUIRED | {"LLM_PORT": "70000"}).items():
        environment.setenv(name, value)
    assert main(["serve"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "LLM_PORT" in line
    assert "65535" in line


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])  # noqa: S104
def test_an_open_address_needs_a_word(
    host: str, environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (REQUIRED | {"LLM_HOST": host}).items():
        environment.setenv(name, value)
    assert main(["serve"]) == 2
    assert "LLM_ALLOW_UNAUTHENTICATED" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_indexes_that_are_declared_wrongly_are_reported_before_anything_starts(
    command: str,
    tmp_path: Path,
    environment: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in REQUIRED:
        environment.setenv(name, "x")
    environment.setenv("LLM_INDEXES_FILE", str(tmp_path / "indexes.toml"))
    (tmp_path / "indexes.toml").write_text('[indexes."results"]\npath = "a"')
    assert main([command]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"setting LLM_INDEXES_FILE: {tmp_path}/indexes.toml: indexes.results: ")
    assert error.count("\n") == 1
