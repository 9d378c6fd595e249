"""Progress of a long command, on standard error."""

import sys
import time

_REDRAW_SECONDS = 0.2
_REPEAT_SECONDS = 5.0
# The first moments give no reliable rate.
_ETA_AFTER_SECONDS = 3.0


class ProgressLine:
    """Progress: one changing line on a terminal, else a line from time to time."""

    def __init__(self) -> None:
        self._moves = sys.stderr.isatty()
        self._step = ""
        self._begun = self._reported_at = time.monotonic()

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._moves:
            sys.stderr.write("\r\x1b[K")

    def report(self, step: str, share: float, detail: str) -> None:
        now = time.monotonic()
        if step != self._step:
            self._step, self._begun = step, now
        if now - self._reported_at < (_REDRAW_SECONDS if self._moves else _REPEAT_SECONDS):
            return
        self._reported_at = now
        passed = now - self._begun
        # A step that writes its output at its end has no share before.
        parts = [f"{step} {share:.0%}" if share > 0 else f"{step}, {passed:.0f} s so far"]
        if share > 0 and passed > _ETA_AFTER_SECONDS:
            parts.append(f"{passed / share - passed:.0f} s left")
        text = ", ".join(filter(None, [*parts, detail]))
        sys.stderr.write(f"\r\x1b[K{text[:78]}" if self._moves else f"{text}\n")
        sys.stderr.flush()
