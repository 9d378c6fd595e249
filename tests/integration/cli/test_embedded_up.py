"""`python -m app up --light` as a person runs it: started, used, killed in parts, stopped."""

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from app.cli.up import processes
from app.cli.up.triton import STUB
from app.infini_gram.declarations import read_declarations
from app.infini_gram.engine import Engine

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [
    pytest.mark.trial,  # each starts all parts of `up`
    pytest.mark.timeout(300),
]


def _command_line(process: psutil.Process) -> str:
    """Empty for one that has just died."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


class Run:
    """One `up`, its output in a file."""

    def __init__(self, directory: Path, name: str = "output", *, indexes: bool = False) -> None:
        self.data, self.output = directory / "data", directory / name
        self.port = processes.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        options = ["--light", "--port", str(self.port), "--data", str(self.data)]
        with self.output.open("wb") as stream:
            self.process = psutil.Popen(
                [sys.executable, "-m", "app", "up", *options],
                cwd=ROOT,
                env=os.environ if indexes else {**os.environ, "LLM_INDEXES_FILE": ""},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        return self.output.read_text()

    def says(self, text: str, times: int = 1) -> None:
        """Wait until its output holds `text`; fails when it ends first."""
        self.until(lambda: self.said.count(text) >= times or self.process.poll() is not None, text)
        assert self.said.count(text) >= times, self.said

    def until(self, holds: Callable[[], bool], what: str, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"{what}: not in {seconds} s:\n{self.said}"
            time.sleep(0.05)

    def send(self, prompt: str) -> dict[str, object]:
        """One result by the public API, waited for."""
        answer = httpx.post(
            f"{self.url}/results/",
            json={"model": "scripted", "content": prompt},
            headers={"Prefer": "wait=50"},
            timeout=60,
        )
        assert answer.status_code == httpx.codes.OK, answer.text
        body: dict[str, object] = answer.json()
        return body

    def part(self, words: str) -> psutil.Process:
        """Its child whose command line holds `words`; a worker is identified by its kind."""
        found = [
            child
            for child in self.process.children()
            if re.search(rf"{words}(?! --kind)", _command_line(child))
        ]
        assert len(found) == 1, f"{words}: {found}"
        return found[0]

    def stub(self) -> psutil.Process:
        """The model's process below Triton."""
        family = self.part("tritonserver").children(recursive=True)
        found = [process for process in family if process.exe().endswith(STUB)]
        assert len(found) == 1, f"stub: {family}"
        return found[0]

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return int(self.process.wait(60))


def are_gone(family: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family)


@contextlib.contextmanager
def ready(directory: Path, name: str = "output", *, indexes: bool = False) -> Iterator[Run]:
    """A run that is ready; nothing of it lives on. The demo index takes it seconds to build."""
    run = Run(directory, name, indexes=indexes)
    try:
        run.says("Ready in")
        yield run
    finally:
        family = [] if run.process.poll() is not None else run.process.children(recursive=True)
        if family:
            run.stop()
        assert are_gone(family), f"orphans: {family}"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run for tests that leave it working."""
    with ready(tmp_path_factory.mktemp("up"), indexes=True) as run:
        yield run


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Run]:
    """A run for a test that ends it."""
    with ready(tmp_path) as run:
        yield run


def test_ready_line_has_what_a_person_needs(shared: Run) -> None:
    curl = re.search(r"curl .*", shared.said)
    assert curl is not None
    answer = subprocess.run(curl.group(), shell=True, capture_output=True, check=True).stdout  # noqa: S602
    assert b'"state":"completed"' in answer
    assert f"{shared.url}/docs\n" in shared.said
    assert httpx.get(f"{shared.url}/docs").status_code == httpx.codes.OK


def test_commands_find_the_service_by_its_settings_file(shared: Run) -> None:
    settings = re.search(r"CLI +(\. .*) && ", shared.said)
    assert settings is not None
    file = Path(shlex.split(settings[1])[1])
    assert file.stat().st_mode & 0o777 == 0o600
    script = f"""{settings[1]} && set -e
{sys.executable} -m app server add away 127.0.0.1:1
{sys.executable} -m app server list
{sys.executable} -m app server remove away
"""
    done = subprocess.run(  # noqa: S602
        script, shell=True, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "away  127.0.0.1:1  -      active  0" in done.stdout
    assert "away is registered" in done.stderr


def test_a_data_directory_in_use_is_told(shared: Run) -> None:
    second = Run(shared.data.parent, "second")
    assert second.process.wait(60) == 1
    assert second.said.startswith(f"Cannot start: The data directory {shared.data} is in use")
    assert str(shared.process.pid) in second.said
    assert second.said.count("\n") == 1


def test_the_demo_index_is_built_and_holds_what_the_demo_model_read(shared: Run) -> None:
    assert "Demo index is built" in shared.said
    (declared,) = read_declarations(shared.data / "indexes.toml")
    assert (declared.name, declared.path) == ("demo", shared.data / "indexes" / "demo")
    engine = Engine(declared)
    assert engine.total_tokens > 1_000_000
    words = engine.tokenizer.encode("import os\n")
    found = engine.find(words)
    assert found.count > 100
    place = found.segment_by_shard[0][0]
    document = engine.document_by_rank(0, place, len(words), 10)
    assert document.metadata["metadata"]["kind"] in ("module", "reference", "exchange")
    assert "import os\n" in engine.tokenizer.decode(document.token_ids)
    assert not list(shared.data.glob("*.jsonl"))


def test_a_text_is_attributed_to_what_the_demo_model_read(shared: Run) -> None:
    answer = httpx.post(
        f"{shared.url}/demo/attribution",
        json={"response": "import os\nimport sys\n", "maximumFrequency": 10**6},
        timeout=100,
    )
    assert answer.status_code == httpx.codes.OK, answer.text
    (span,) = answer.json()["spans"]
    assert span["text"] in span["documents"][0]["text"]


@pytest.mark.parametrize(
    ("name", "find"),
    [
        ("PostgreSQL", lambda run: run.part("postgres")),
        ("API", lambda run: run.part("app serve")),
        ("Worker", lambda run: run.part("app worker")),
        ("Attribution demo", lambda run: run.part("--kind attribution")),
        ("Triton", lambda run: run.part("tritonserver")),
        ("Triton", lambda run: run.stub()),
    ],
    ids=["postgres", "api", "worker", "attribution", "tritonserver", "stub"],
)
def test_every_part_comes_back_after_kill_9(
    shared: Run, name: str, find: Callable[[Run], psutil.Process]
) -> None:
    times = shared.said.count(f"{name} is back") + 1
    find(shared).kill()
    shared.says(f"{name} is back", times)
    assert shared.send("{{text=fine}}")["state"] == "completed"


def test_orphans_of_a_part_are_ended_and_collected(shared: Run) -> None:
    times = shared.said.count("Triton is back") + 1
    stub = shared.stub()
    stub.suspend()  # It cannot end by itself when its server does.
    shared.part("tritonserver").kill()
    shared.says("Triton is back", times)
    shared.until(lambda: not psutil.pid_exists(stub.pid), "the stub is gone, and no zombie")


def test_data_survives_and_nothing_is_orphaned(own: Run) -> None:
    sent = own.send("{{text=kept}}")
    family = own.process.children(recursive=True)
    assert len(family) > 4
    assert own.stop() == 0
    assert are_gone(family)
    with ready(own.data.parent, "again") as again:
        answer = httpx.get(f"{again.url}/results/{sent['id']}")
        assert answer.json()["result"].strip() == "kept"
        assert again.stop(signal.SIGTERM) == 0


def test_a_server_is_launched_here_and_ends_with_the_rest(own: Run) -> None:
    body = {"name": "second", "model": str(ROOT / "triton" / "models" / "scripted")}
    made = httpx.post(f"{own.url}/launches", json=body)
    assert made.status_code == httpx.codes.ACCEPTED, made.text
    url = f"{own.url}{made.headers['location']}"

    def is_healthy() -> bool:
        found = httpx.get(url).json()
        assert found["state"] not in ("failed", "stopped", "timeout"), found
        return bool(found["state"] == "healthy")

    own.until(is_healthy, "the launched server")
    own.part("app worker").kill()  # the server is none of its children
    own.says("Worker is back")
    launched = [
        process
        for process in own.process.children(recursive=True)
        if process.is_running() and "LAUNCH_ID" in process.environ()
    ]
    assert len(launched) >= 3  # the script, the server, the model
    assert httpx.get(url).json()["state"] == "healthy"
    assert own.stop() == 0
    own.until(lambda: are_gone(launched), "the launched server is gone")


def test_nothing_is_orphaned_by_kill_9(own: Run) -> None:
    family = own.process.children(recursive=True)
    own.process.kill()
    own.process.wait()
    own.until(lambda: are_gone(family), "all processes gone")


def test_a_second_signal_ends_it_at_once(own: Run) -> None:
    family = own.process.children(recursive=True)
    own.part("app worker").suspend()  # It will not stop by being asked.
    own.process.send_signal(signal.SIGINT)
    own.says("Worker: stopping")
    assert own.stop() == 130
    own.until(lambda: are_gone(family), "all processes gone")


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with socket.create_server(("127.0.0.1", run.port)):
        assert run.process.wait(60) == 1
    assert run.said == (
        f"Cannot start: Port {run.port} is taken: choose another with PORT={run.port + 1}.\n"
    )
