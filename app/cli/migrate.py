"""`python -m app migrate`: Alembic's migrations in db/."""

import argparse

from app.core.program import ROOT
from app.core.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run)


def _run(_options: argparse.Namespace) -> int:
    from alembic import command
    from alembic.config import Config  # here: it logs, when it is imported

    config = Config()
    config.set_main_option("script_location", str(ROOT / "db"))
    config.attributes["settings"] = Settings()
    command.upgrade(config, "head")
    return 0
