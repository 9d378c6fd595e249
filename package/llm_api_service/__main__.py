"""The command `llm-api-service`: the commands of `python -m app`, installed."""

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_INSTALLED = _HERE / "root"
# An editable installation uses the repository itself.
_ROOT = _INSTALLED if _INSTALLED.is_dir() else _HERE.parents[1]


def main() -> int:
    # `app` is too common a name for the top of an environment that other packages share.
    sys.path.insert(0, str(_ROOT))
    from app.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
