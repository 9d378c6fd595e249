"""The progress of a job: a bar of tqdm where it is installed, otherwise a line on a terminal."""

import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

from llm_api_client.jobs.records import JobInfo, Row
from llm_api_client.notebook import duration

_LINE_SECONDS = 0.5


class _Bar(Protocol):
    total: float | None
    n: float
    initial: float

    def reset(self, total: float | None) -> object: ...

    def set_postfix_str(self, text: str, *, refresh: bool = ...) -> object: ...

    def refresh(self) -> object: ...

    def close(self) -> object: ...


class Progress:
    """Shows the rows that have ended, their rate, tokens, failures, and the time that is left.

    Args:
        is_shown: None: on terminals and in notebooks.
        total: rows, if the number is known.
    """

    def __init__(self, *, is_shown: bool | None = None, total: int | None = None) -> None:
        self.total = total
        self.failed = 0
        self.tokens = 0
        self._done = 0
        self._is_measured = False
        self._began = time.monotonic()
        self._shown_at = 0.0
        self._is_shown = _is_interactive() if is_shown is None else is_shown
        self._bar: _Bar | None = None

    def open(self) -> None:
        """Begin a run."""
        self._began = time.monotonic()
        self._is_measured = False
        self._bar = _bar(self.total) if self._is_shown else None

    def show(self, info: JobInfo) -> None:
        """Show the counts of the service."""
        counts = info.counts
        done = counts.completed + counts.failed
        # The rate is that of the rows that end from now on; retried rows end again.
        if self._bar is not None and (not self._is_measured or done < self._done):
            self._bar.reset(self.total)
            self._bar.initial = done
            self._is_measured = True
        self._done, self.failed = done, counts.failed
        if self.total is None and info.state != "open":
            self.total = counts.rows
        self._draw()

    def count(self, rows: Sequence[Row[Any]]) -> None:
        """Count rows that were read."""
        for row in rows:
            if row.result is not None and row.result.usage is not None:
                usage = row.result.usage
                counted = usage.completion_tokens if row.vector is None else usage.prompt_tokens
                self.tokens += counted or 0
        self._draw()

    def _draw(self) -> None:
        now = time.monotonic()
        if self._bar is None or now - self._shown_at < _LINE_SECONDS:
            return
        self._shown_at = now
        rate = self.tokens / max(now - self._began, 1e-3)
        self._bar.total, self._bar.n = self.total, self._done
        failed = f", {self.failed} failed" if self.failed else ""
        self._bar.set_postfix_str(f"{self.tokens} tokens, {rate:.0f}/s{failed}", refresh=False)
        self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._shown_at = 0.0
            self._draw()
            self._bar.close()
            self._bar = None


def _is_interactive() -> bool:
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def _bar(total: int | None) -> _Bar:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return _Line(total)
    bar: _Bar = tqdm(total=total, unit="row")
    return bar


class _Line:
    """A line on standard error, in place of tqdm."""

    def __init__(self, total: float | None) -> None:
        self._note = ""
        self.reset(total)

    def reset(self, total: float | None) -> None:
        """Measure the rate from now on."""
        self.total, self.n, self.initial = total, 0.0, 0.0
        self._began = time.monotonic()

    def set_postfix_str(self, text: str, *, refresh: bool = True) -> None:
        self._note = text
        if refresh:
            self.refresh()

    def refresh(self) -> None:
        rate = (self.n - self.initial) / max(time.monotonic() - self._began, 1e-3)
        total = "?" if self.total is None else f"{self.total:.0f}"
        left = ""
        if self.total is not None and rate > 0:
            left = f", {duration((self.total - self.n) / rate)} left"
        sys.stderr.write(f"\r{self.n:.0f}/{total} rows, {rate:.0f}/s{left}, {self._note}\x1b[K")
        sys.stderr.flush()

    def close(self) -> None:
        sys.stderr.write("\n")
