"""Answers of judges: what other people's libraries, in Triton's environment, compute from an input of the tests.

An answer is a pure function of the judge's script, its input and the locked libraries. It is stored in
`tests/answers` beside a digest of these. While the digest holds, the stored answer is used; else the judge
runs, and the file is written again, to be committed. `JUDGES=1`, as in `make soak`, runs all judges.
"""

import gzip
import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.conftest import ROOT, TRITON_VENV

ANSWERS = ROOT / "tests" / "answers"
_LOCKS = (ROOT / "triton" / "requirements-cpu.txt", ROOT / "triton" / "requirements-torch.txt")


def judge(
    script: Path,
    given: str = "",
    *,
    arguments: Callable[[], Sequence[str | Path]] = tuple,
    depends: Sequence[Path] = (),
    environment: Mapping[str, str] = {},
) -> str:
    """The standard output of a script that reads `given`, from the store where nothing has changed.

    `arguments` are computed only for a judge that runs; the files in `depends` are what they are made from.
    """
    parts = [path.read_bytes() for path in (script, *depends, *_LOCKS)]
    parts += [given.encode(), json.dumps(sorted(environment.items())).encode()]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()
    file = ANSWERS / f"{script.stem}.json.gz"
    stored = json.loads(gzip.decompress(file.read_bytes())) if file.exists() else {}
    if stored.get("digest") == digest and os.environ.get("JUDGES") != "1":
        return str(stored["answer"])
    with tempfile.TemporaryDirectory() as directory:
        ran = subprocess.run(
            [TRITON_VENV / "bin" / "python", "-I", script, *arguments()],
            input=given, env=os.environ | environment, cwd=directory, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    file.parent.mkdir(exist_ok=True)
    text = json.dumps({"digest": digest, "answer": ran.stdout})
    file.write_bytes(gzip.compress(text.encode(), mtime=0))
    return ran.stdout
