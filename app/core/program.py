"""This copy of the program: a checkout, or the package that `pip install .` makes; its names for users."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The package holds its files in `llm_api_service/root`, below its launcher.
IS_PACKAGE = ROOT.name == "root" and (ROOT.parent / "__main__.py").is_file()
PROGRAM = "llm-api-service" if IS_PACKAGE else "python -m app"
INSTALLER = "pip install" if IS_PACKAGE else "make run"
_FLAGS = {"LIGHT=1": "--light", "GPU=0": "--no-gpu", "GPU=1": "--gpu"}


def argument(variable: str, value: object = "") -> str:
    """An argument of `up` as its user gives it: `PORT=8887` to make, `--port 8887` to the package."""
    given = f"{variable}={value}"
    if not IS_PACKAGE:
        return given
    option = "--" + variable.lower().replace("_", "-")
    return _FLAGS.get(given, f"{option} {value}".rstrip())
