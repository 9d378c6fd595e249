"""Options, progress and errors of an index's build."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app.infini_gram.corpus import Split
from app.infini_gram.declarations import BYTES

GIB = 1 << 30
# Called from time to time with the step, its progress (0 to 1) and a detail.
Report = Callable[[str, float, str], None]


class BuildError(Exception):
    """No index was built, and no file is left; the message is one line."""


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """An index to build in `directory`, which must not exist yet unless `replace` is set.

    `tokenizer` is a path or "bytes"; `end_id` its end-of-text token, if its files do not name one.
    `memory` bounds the indexer, in bytes; `open_files` its open files.
    """

    corpus: Path
    directory: Path
    tokenizer: str = BYTES
    end_id: int | None = None
    split: Split = "file"
    memory: int = GIB
    cpus: int = 2
    open_files: int | None = None
    replace: bool = False
