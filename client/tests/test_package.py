"""The distribution: its imports, its size, its wheel."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "llm_api_client"


def test_the_client_imports_nothing_of_the_service() -> None:
    for file in PACKAGE.rglob("*.py"):
        assert not re.search(
            r"^\s*(?:from|import) (?:app|tests)\b", file.read_text(), re.MULTILINE
        ), file


def test_an_import_loads_nothing_heavy() -> None:
    script = "import llm_api_client, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = {"pydantic", "numpy", "pandas", "pyarrow", "tqdm", "fastapi", "app", "polars"}
    assert not heavy & set(loaded)


def test_the_wheel_is_small_and_typed(tmp_path: Path) -> None:
    uv = Path(sys.prefix) / "bin" / "uv"
    subprocess.run(
        [uv, "build", "--quiet", "--offline", "--wheel", "--out-dir", tmp_path, ROOT], check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 100_000
    names = zipfile.ZipFile(wheel).namelist()
    assert "llm_api_client/py.typed" in names
    assert not [name for name in names if name.startswith("tests")]
