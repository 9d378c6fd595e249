"""vLLM's report of its cache in the log when it starts."""

import re
from dataclasses import dataclass
from pathlib import Path

# "Explicitly set (0.19/14.84) GiB for KV cache", then "CPU KV cache size: 32,768 tokens, Maximum
# concurrency for 1,024 tokens per request: 32.00x".
_REPORT = re.compile(
    r"set \((?P<gib>[\d.]+)/[\d.]+\) GiB for KV cache.*?"
    r"CPU KV cache size: (?P<tokens>[\d,]+) tokens, "
    r"Maximum concurrency for (?P<context>[\d,]+) tokens per request: (?P<requests>[\d.]+)x",
    re.DOTALL,
)
BLOCK_TOKENS = 128  # of vLLM on a CPU


@dataclass(frozen=True)
class CacheReport:
    """`gib` is rounded to hundredths, as `requests` is."""

    gib: float
    tokens: int
    context: int
    requests: float


def last_report(log_file: Path) -> CacheReport:
    """The report of the engine that started last."""
    *_, last = _REPORT.finditer(log_file.read_text(errors="replace"))
    tokens, context = (int(last[name].replace(",", "")) for name in ("tokens", "context"))
    return CacheReport(float(last["gib"]), tokens, context, float(last["requests"]))
