"""The repository's layout: files and imports that must not exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Files that are still longer: remove a line when its file is split, never add one.
NOT_SPLIT_YET = {
    "bench/index_questions.py",
    "bench/p8_growth.py",
    "bench/service_model.py",
    "bench/statements.py",
    "nvidia_triton/__main__.py",
}
GENERIC = {"models.py", "utils.py", "helpers.py", "common.py", "misc.py"}
# Places of one machine: homes, temporary folders, mounts. Docker's own paths are of no machine.
PLACES = re.compile(r"(?<![\w.$}/-])/(?:work|root|home/\w+|mnt|Users|tmp/(?!\.)\w+)\b")


def tracked() -> list[Path]:
    """The files of the repository, committed or about to be."""
    found = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    files = [ROOT / name for name in found.stdout.split("\0") if name]
    return [file for file in files if file.is_file()]


def texts() -> list[tuple[Path, str]]:
    found = []
    for file in tracked():
        try:
            found.append((file.relative_to(ROOT), file.read_text()))
        except UnicodeDecodeError:
            continue
    return found


@pytest.mark.parametrize("where", [ROOT, ROOT / "app", ROOT / "tests"])
def test_triton_is_no_package(where: Path) -> None:
    """OpenAI's kernel package has the same name: torch and vLLM must never find ours."""
    script = (
        "import importlib.util, sys; spec = importlib.util.find_spec('triton');"
        f"sys.exit(spec is not None and {str(ROOT)!r} in str(spec.submodule_search_locations))"
    )
    # The installed service is run by `python -m app` in the root: its own import must not see it.
    in_service = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=where, check=False, capture_output=True
    )
    assert in_service.returncode == 0


def test_triton_holds_nothing_that_could_be_imported() -> None:
    assert not list((ROOT / "triton").glob("*.py"))
    assert not list((ROOT / "triton").rglob("__init__.py"))
    assert not list((ROOT / "models").rglob("__init__.py"))
    assert not list((ROOT / "db").rglob("__init__.py"))


def test_tensors_and_engines_stay_outside_the_service() -> None:
    forbidden = re.compile(r"^\s*(?:import|from) (torch|vllm|numpy|triton)\b", re.MULTILINE)
    for file in (ROOT / "app").rglob("*.py"):
        assert not forbidden.search(file.read_text()), file


def test_grpc_stays_in_tritons_client() -> None:
    importers = [
        file.relative_to(ROOT / "app").as_posix()
        for file in (ROOT / "app").rglob("*.py")
        if re.search(r"^\s*(?:import|from) (tritonclient|grpc)\b", file.read_text(), re.MULTILINE)
    ]
    names = ("client", "exposure", "messages", "session", "stream")
    inputs, messages = "inference/model_inputs.py", "inference/session_messages.py"
    assert sorted(importers) == [inputs, messages, *(f"inference/triton_{one}.py" for one in names)]


def test_few_files_write_the_state() -> None:
    """Every end by one statement; new results by their own and, of attributions, by their source's."""
    writes = {
        r"UPDATE results\b(?: r)?\s+SET\s+(?:[^;]*?,\s*)?state\s*=": ["queue/terminal_state.py"],
        r"INSERT INTO results\b": ["queue/enqueue_sql.py", "queue/finish.py"],
    }
    for pattern, files in writes.items():
        writers = [
            file.relative_to(ROOT / "app").as_posix()
            for file in sorted((ROOT / "app").rglob("*.py"))
            if re.search(pattern, file.read_text())
        ]
        assert writers == files


def test_modules_have_meaningful_names() -> None:
    generic = [
        file for file in (ROOT / "app").rglob("*.py")
        if file.name in GENERIC and "api" not in file.parts
    ]  # fmt: skip
    assert not generic
    # "Model" means an LLM that Triton serves: tables live in core/tables.
    assert "metadata = sa.MetaData(" in (ROOT / "app" / "core" / "tables" / "schema.py").read_text()


def test_files_have_at_most_350_lines() -> None:
    roots = ("app", "client", "triton", "tools", "bench", "nvidia_triton")
    lengths = {
        path.as_posix(): text.count("\n")
        for path, text in texts()
        if path.suffix == ".py" and path.parts[0] in roots
    }
    assert {path for path, length in lengths.items() if length > 350} == NOT_SPLIT_YET


def test_no_file_names_a_place_of_this_machine() -> None:
    named = [
        f"{path}: {found[0]}"
        for path, text in texts()
        if path != Path(__file__).relative_to(ROOT)
        for found in [PLACES.search(text)]
        if found
    ]
    assert not named


def test_no_conflict_marks_and_no_tabs_in_python() -> None:
    for path, text in texts():
        assert "<<<<<<< " not in text or path.name == "test_layout.py", path
        if path.suffix == ".py":
            assert "\t" not in text, path


def test_every_module_states_its_purpose() -> None:
    silent = [
        path.as_posix()
        for path, text in texts()
        if path.suffix == ".py"
        and path.parts[0] in ("app", "client", "tests", "bench", "triton", "nvidia_triton")
        and text.strip() and not text.lstrip().startswith(('"""', "#!"))
    ]  # fmt: skip
    assert not silent
