"""What `make lint` says of a secret in a file; the repository's own run is in `make lint`."""

import subprocess
from pathlib import Path

from tests.conftest import ROOT

KEY = "AKIA" + "QYLPMN5HFIQR7XYA"  # in two pieces, or it would be found here


def test_a_secret_is_found_and_a_known_one_is_not(tmp_path: Path) -> None:
    for text, code in ((f"key = '{KEY}'\n", 1), ("key = 'of-the-house'\n", 0)):
        file = tmp_path / "settings.ini"
        file.write_text(text)
        found = subprocess.run(
            [ROOT / ".venv" / "bin" / "detect-secrets-hook", "--no-verify", file],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
        assert found.returncode == code, found.stdout + found.stderr
