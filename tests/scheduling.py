"""Distribution of test files to processes.

A file is never divided; neither are the files of a group in `_GROUPS`. A process that dies fails the
test that it ran, and ends the run: the others finish the files that they have.
"""

import contextlib

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# Each of these takes minutes: they begin, in this order, and one process runs all of a group.
_GROUPS = (
    # Engines of tiny models on one Triton: each takes 13 s of a core to start. The last file kills it.
    (
        "tests/e2e/test_quantizations.py",
        "tests/e2e/test_other_models.py",
        "tests/e2e/test_embeddings.py",
        "tests/e2e/test_launches.py",
        "tests/e2e/test_vision.py",
        "tests/e2e/test_adapters.py",
        "tests/e2e/test_tools.py",
        "tests/e2e/test_processes.py",
    ),
    # The engine of the demo model, which they share, and vLLM's own server beside it.
    ("tests/e2e/",),
    # Thousands of streams or requests at a time, and bounds on their delays: not two at a time.
    (
        "tests/chaos/test_many_streams.py",
        "tests/chaos/test_waiting.py",
        "tests/chaos/test_cancels.py",
        "tests/chaos/test_load.py",
    ),
    # One Chromium and one `app up` that they share.
    ("tests/browser/",),
)
_ORDER = (*(start for group in _GROUPS for start in group), "tests/chaos/", "tests/integration/")
# A process begins a test once it knows the one that follows.
_KNOWN_TESTS = 2


class ByFile(LoadScopeScheduling):  # type: ignore[misc] # xdist ships no type information
    """Gives a process whole files, and each of `_GROUPS` as if it were one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((group[0] for group in _GROUPS if file.startswith(group)), file)

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test in which the process died; the run ends (`--max-worker-restart=0`).

        The parent class hands that test on, and the next process dies in it.
        """
        files = self.assigned_work.pop(node)
        left = (test for tests in files.values() for test, ended in tests.items() if not ended)
        return next(left, None)

    def _reschedule(self, node: WorkerController) -> None:
        super()._reschedule(node)
        while self.workqueue and not node.shutting_down and self._tests_of(node) < _KNOWN_TESTS:
            self._assign_work_unit(node)

    def _assign_work_unit(self, node: WorkerController) -> None:
        with contextlib.suppress(OSError):  # it has just died: `remove_node` hands the file on
            super()._assign_work_unit(node)

    def _tests_of(self, node: WorkerController) -> int:
        return int(self._pending_of(self.assigned_work[node]))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    """Called by xdist."""
    config.option.loadscopereorder = False  # it would begin with what has the most tests
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that all processes end at about the same time."""

    def place(item: pytest.Item) -> int:
        file = item.nodeid.partition("::")[0]
        return next((n for n, start in enumerate(_ORDER) if file.startswith(start)), len(_ORDER))

    items.sort(key=place)
