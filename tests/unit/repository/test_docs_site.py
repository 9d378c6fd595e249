"""`make docs`: the site is made without a warning, so no link in it is dead."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.mark.trial
@pytest.mark.timeout(300)  # 30 s of CPU time, on a machine that may have ten other tasks
@pytest.mark.shard("docs")
def test_the_site_is_whole(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs/sphinx_site",
         "-d", str(tmp_path / "trees"), "docs", str(tmp_path / "site")],
        cwd=ROOT,
        check=True,
        timeout=280,
    )  # fmt: skip
    pages = {path.stem for path in (tmp_path / "site").glob("*.html")}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= pages
    reference = (tmp_path / "site" / "api.html").read_text()
    assert "/results/{result_id}/stream" in reference
    assert "max_tokens" in reference
    client = (tmp_path / "site" / "client_api.html").read_text()
    assert "client.launches.create" in client
    assert "Idempotency-Key" in client or "idempotency_key" in client
    assert '<script src="http' not in reference  # nothing from elsewhere
