"""The command line: arguments, exit statuses, output for terminals and programs."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from llm_api_client import Client, config
from llm_api_client.cli import jobs, main as cli
from llm_api_client.cli.output import Output, shown
from llm_api_client.jobs.records import Row, failed_row

RESULT = {"id": "r-1", "state": "completed", "model_name": "m", "result": "a\x1b[31m\nb"}
MODEL = {"name": "m", "ready": True, "chat": True, "max_model_len": 4096}
Run = Callable[..., int]


@pytest.fixture
def requests() -> list[httpx.Request]:
    return []


@pytest.fixture
def run(requests: list[httpx.Request], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run a command against these responses, one for each path."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("LLM_API_URL", raising=False)
    monkeypatch.delenv("LLM_API_KEY", raising=False)

    def run(*words: str, stdin: str = "", **answers: tuple[int, Any]) -> int:
        def handle(request: httpx.Request) -> httpx.Response:
            requests.append(request)
            status, body = answers[request.url.path.strip("/").partition("/")[0]]
            return httpx.Response(status, json=body)

        def connect(*given: Any, **options: Any) -> Client:
            return Client(*given, transport=httpx.MockTransport(handle), **options)

        monkeypatch.setattr(cli, "Client", connect)
        monkeypatch.setattr("llm_api_client.cli.account.Client", connect)
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        return cli.main(words)

    return run


def test_send_reads_standard_input(run: Run, requests: list[httpx.Request], capsys: Any) -> None:
    words = ["send", "-m", "m", "--max-tokens", "5", "-p", 'stop=["x"]', "-p", "name=text"]
    assert run(*words, stdin="prompt\n", results=(202, RESULT)) == 0
    assert json.loads(requests[0].content) == {
        "model": "m",
        "parameters": {"max_tokens": 5, "stop": ["x"], "name": "text"},
        "content": "prompt\n",
    }
    assert capsys.readouterr().out == "r-1\n"
    assert run("send", "-m", "m", "--reuse", stdin="prompt", results=(202, RESULT)) == 0
    assert json.loads(requests[1].content)["reuse"] is True


def test_send_takes_the_only_model(run: Run, requests: list[httpx.Request]) -> None:
    assert (
        run("send", "hi", "--system", "be brief", models=(200, [MODEL]), results=(202, RESULT)) == 0
    )
    assert json.loads(requests[1].content)["messages"] == [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"},
    ]  # fmt: skip
    assert run("send", "hi", models=(200, [MODEL, {**MODEL, "name": "n"}])) == 2


@pytest.mark.parametrize(
    ("state", "status", "expected"),
    [
        ("completed", 200, 0), ("failed", 200, 1), ("completed", 404, 3), ("completed", 401, 3),
        ("completed", 503, 4),
    ],
)  # fmt: skip
def test_exit_statuses(run: Run, state: str, status: int, expected: int) -> None:
    error = {"code": "cancelled", "message": "x"} if state == "failed" else None
    answer: dict[str, Any] = {**RESULT, "state": state, "error": error}
    if status != 200:
        answer = {"code": "c", "status": status, "detail": "d"}
    assert run("--patience", "0", "get", "r-1", results=(status, answer)) == expected


def test_wrong_usage() -> None:
    for words in ([], ["nothing"], ["send", "--max-tokens", "many"], ["completion", "cmd"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 2
    assert cli.main(["--url", "nowhere", "models"]) == 2


def test_json_stands_anywhere(run: Run, capsys: Any) -> None:
    for words in (["--json", "models"], ["models", "--json"]):
        assert run(*words, models=(200, [MODEL])) == 0
        assert json.loads(capsys.readouterr().out)[0]["name"] == "m"


def test_json_is_one_line_for_each_reader(run: Run, capsys: Any) -> None:
    text = "one\x85two\u2028three\u2029four"
    assert run("get", "r-1", "--json", results=(200, RESULT | {"result": text})) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["result"] == text


def test_a_table_for_people(run: Run, capsys: Any) -> None:
    assert run("list", results=(200, [RESULT])) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["ID", "STATE", "MODEL", "CREATED", "TOKENS", "TEXT"]
    assert row.split()[:3] == ["r-1", "completed", "m"]
    assert "\x1b" not in row


def test_a_pair_of_metadata_has_a_value(run: Run, capsys: Any) -> None:
    assert run("list", "--metadata", "run", results=(200, [])) == 2
    assert "KEY=VALUE" in capsys.readouterr().err


def test_text_keeps_its_bytes_in_a_pipe(run: Run, capsys: Any) -> None:
    assert run("get", "r-1", results=(200, RESULT)) == 0
    assert capsys.readouterr().out == "a\x1b[31m\nb\n"
    assert shown("a\x1b[31m\nb") == "a�[31m\nb"


def test_colours_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert not Output().has_colours
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert Output().has_colours
    assert not Output(no_color=True).has_colours
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Output().has_colours


def test_a_row_that_was_sent_again_has_no_failure(capsys: Any) -> None:
    failed, lost = failed_row("a", "model_error", "m"), failed_row("b", "model_error", "m")
    rows: Any = [failed, lost, Row(key="a", text="t")]
    assert jobs._read(rows, Output(), prints=True) == 1
    assert "1 rows have no answer" in capsys.readouterr().err
    assert jobs._read(rows[::2], Output(), prints=True) == 0


def test_login_checks_the_key_before_it_stores_it(
    run: Run, requests: list[httpx.Request], tmp_path: Path
) -> None:
    words = ["login", "--url", "https://service"]
    refused = {"code": "invalid_token", "status": 401, "detail": "d"}
    assert run(*words, stdin="wrong\n", me=(401, refused)) == 3
    assert not (tmp_path / "llm-api").exists()
    assert run(*words, stdin="right\n", me=(200, {"team_id": "red", "scopes": ["use"]})) == 0
    assert requests[-1].headers["authorization"] == "Bearer right"
    assert config.resolve().key == "right"
    words[-1] = "http://service"
    assert run(*words, stdin="right\n") == 2
    caller = {"team_id": "red", "scopes": ["use"]}
    assert run(*words, "--allow-http", stdin="right\n", me=(200, caller)) == 0
    assert config.resolve().key == "right"


def test_completion_names_every_command(run: Run, capsys: Any) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert run("completion", shell) == 0
        printed = capsys.readouterr().out
        assert all(name in printed for name in ("login", "send", "follow", "compare", "attribute"))
