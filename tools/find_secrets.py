"""Search for secrets in the files that git tracks: those that .secrets.baseline does not know.

    python tools/find_secrets.py

Prints one line for each finding; exit status 1 if there is any. A known secret is known wherever it stands in
its file. Files in which none was found are searched again only after a change of the file, of the baseline or of
detect-secrets.
"""

import hashlib
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path

from detect_secrets.core import baseline
from detect_secrets.core.secrets_collection import SecretsCollection

_BASELINE = Path(".secrets.baseline")
_CLEAN = Path(".cache/files_without_secrets")  # their digests, a line each
_FILES_A_TASK = 20
_MANY = 300  # files, whose search takes more than a moment

_known = SecretsCollection()


def main() -> int:
    listing = subprocess.check_output(["git", "ls-files", "-z"], text=True)  # noqa: S607
    paths = [Path(name) for name in listing.split("\0") if name]
    digests = _digests(path for path in paths if path.is_file() and path != _BASELINE)
    clean = set(_CLEAN.read_text().split()) if _CLEAN.exists() else set()
    due = [path for path in digests if digests[path] not in clean]
    if len(due) > _MANY:
        sys.stderr.write(f"Searching {len(due):,} files for secrets: 1 to 2 minutes, once\n")
    with ProcessPoolExecutor(initializer=_read_baseline) as pool:
        found = dict(zip(due, pool.map(_search, due, chunksize=_FILES_A_TASK), strict=True))
    _CLEAN.parent.mkdir(exist_ok=True)
    _CLEAN.write_text("".join(f"{digests[path]}\n" for path in digests if not found.get(path)))
    lines = [line for path in due for line in found[path]]
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 1 if lines else 0


def _digests(paths: Iterable[Path]) -> dict[Path, str]:
    searched_by = hashlib.sha256(version("detect-secrets").encode() + _BASELINE.read_bytes())
    found = {}
    for path in paths:
        digest = searched_by.copy()
        digest.update(f"{path}\0".encode() + path.read_bytes())
        found[path] = digest.hexdigest()
    return found


def _read_baseline() -> None:
    """Read the known secrets, and use the baseline's plugins and filters in this process."""
    global _known
    _known = baseline.load(baseline.load_from_file(str(_BASELINE)), str(_BASELINE))


def _search(path: Path) -> list[str]:
    found = SecretsCollection()
    found.scan_file(str(path))
    return [
        f"{name}:{secret.line_number}: {secret.type}: remove it, or add it to {_BASELINE} if it is none"
        for name, secret in found - _known
    ]


if __name__ == "__main__":
    sys.exit(main())
