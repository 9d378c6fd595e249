"""`python -m app serve`: the API."""

import argparse
import logging
import sys

from app.cli.startup import read_settings, schema_fits

logger = logging.getLogger(__name__)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run)
    parser.add_argument(
        "--with-worker", action="store_true", help="run a worker inside the same process"
    )


def _run(options: argparse.Namespace) -> int:
    from app.api.startup_checks import check_startup

    settings = read_settings()
    exposure = check_startup(settings)
    for line in exposure.warnings:
        logger.warning("%s", line)
    if exposure.refusal:
        sys.stderr.write(f"{exposure.refusal}\n")
        return 2
    for line in exposure.notes:
        logger.info("%s", line)
    if not schema_fits(settings):
        return 2

    from app.api.app import create_app
    from app.api.server import serve

    app = create_app(settings, with_worker=options.with_worker)
    return serve(app, settings)
