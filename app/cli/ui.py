"""`python -m app ui`: the web page."""

import argparse

from app.api.server import serve
from app.ui.main import create_ui
from app.ui.settings import UiSettings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run)


def _run(_options: argparse.Namespace) -> int:
    settings = UiSettings()
    return serve(create_ui(settings), settings)
