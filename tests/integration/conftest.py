"""Fixtures of the integration tests alone."""

import gc
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture
def collect_broken_sockets() -> Iterator[None]:
    """Collect, before the next test, what a test left that breaks connections on purpose."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
