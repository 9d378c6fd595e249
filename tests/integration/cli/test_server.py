"""`python -m app server`: effects, output and status, also of failures."""

import asyncio
from pathlib import Path

import pytest

from app.cli.main import main
from app.core.settings import Settings
from tests.conftest import connect
from tests.integration.cli.test_token import environment_of
from tests.postgres import PostgresServer


class Command:
    """`server`, run in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    async def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit status, standard output and standard error."""
        self._capsys.readouterr()
        status = await asyncio.to_thread(main, ["server", *arguments])
        return (status, *self._capsys.readouterr())


@pytest.fixture
def server(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    for name, value in environment_of(settings).items():
        monkeypatch.setenv(name, value)
    return Command(capsys)


async def test_from_registering_a_server_to_its_end(server: Command) -> None:
    for _ in range(2):
        status, out, said = await server("add", "gpu-2", "10.0.0.2:8001", "--slots", "64")
        assert (status, out) == (0, "")
        assert "gpu-2 is registered" in said
    status, _, error = await server("add", "gpu-2", "10.0.0.3:8001")
    assert (status, error.count("\n")) == (1, 1)
    assert "10.0.0.2:8001" in error
    assert (await server("drain", "gpu-2"))[0] == 0
    _, out, _ = await server("list")
    assert [line.split() for line in out.splitlines()] == [
        ["name", "grpc", "slots", "state", "running"],
        ["gpu-2", "10.0.0.2:8001", "64", "draining", "0"],
    ]
    assert (await server("resume", "gpu-2"))[0] == 0
    assert " active " in (await server("list"))[1]
    assert (await server("remove", "gpu-2"))[0] == 0
    for command in ("drain", "resume", "remove"):
        status, _, error = await server(command, "gpu-2")
        assert (status, error.count("\n")) == (1, 1)
        assert "gpu-2" in error


async def test_a_secret_comes_from_a_file_and_is_not_shown(
    server: Command, settings: Settings, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text("secret-of-gpu-2\n")
    status, out, said = await server("add", "gpu-2", "10.0.0.2:8001", "--secret-file", str(file))
    assert status == 0
    assert "secret-of" not in out + said + (await server("list"))[1]
    connection = await connect(settings)
    try:
        assert await connection.fetchval("SELECT secret FROM servers") == "secret-of-gpu-2"
    finally:
        await connection.close()
    with pytest.raises(SystemExit):
        await server("add", "gpu-3", "10.0.0.3:8001", "--secret-file", str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [(("a/b", "host:1"), "name"), (("a", "host"), "grpc"), (("a", "b:1", "--slots", "0"), "slots")],
)
async def test_wrong_arguments_are_named(
    server: Command, arguments: tuple[str, ...], field: str
) -> None:
    status, _, error = await server("add", *arguments)
    assert (status, error.count("\n")) == (1, 1)
    assert error.startswith(f"{field}: ")


async def test_a_database_that_cannot_be_used_is_told_in_a_line(
    server: Command, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_DATABASE_DB", postgres_server.maintenance_database)  # no tables
    status, _, error = await server("list")
    assert (status, error.count("\n")) == (1, 1)
    assert "python -m app migrate" in error
    monkeypatch.setenv("LLM_DATABASE_DB", "none")
    status, _, error = await server("drain", "a")
    assert (status, error.count("\n")) == (1, 1)
    monkeypatch.setenv("LLM_DATABASE_URL", "127.0.0.1:1")
    monkeypatch.setenv("LLM_DATABASE_TIMEOUT_SECONDS", "0.2")
    status, _, error = await server("remove", "a")
    assert (status, error.count("\n")) == (1, 1)
