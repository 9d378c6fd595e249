"""The documents of an index that are removed: those whose tokens are in another index, of removed documents.

The index itself stays unchanged, and its documents keep their numbers. The removed documents are found in it once,
when it is opened; the package's `InfiniGramEngineDiff` compares the texts of places at each query instead.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from app.infini_gram.engine import Engine
from app.infini_gram.manifest import ManifestError

Place = tuple[int, int]  # a shard, and a document's number in it
Copies = Callable[[bytes], list[Place]]  # the documents with a content: a separator and tokens


class RemovedDocuments:
    """Places of removed documents in an index, and their numbers in it."""

    def __init__(self, index: Engine, copies: Copies, removed: Engine) -> None:
        """Find them. Raises ManifestError if one is not in the index, or is not as often in it."""
        self._starts: list[list[int]] = [[] for _ in index.shards]
        self._ends: list[list[int]] = [[] for _ in index.shards]
        self.numbers: set[int] = set()
        bases = [sum(one.documents for one in index.shards[:n]) for n in range(len(index.shards))]
        for shard, document in sorted(_places(index, copies, removed)):
            start, end = index.shards[shard].bounds(document)
            self._starts[shard].append(start)
            self._ends[shard].append(end)
            self.numbers.add(bases[shard] + document)

    def has_pointer(self, shard: int, pointer: int) -> bool:
        """Return whether the pointer is in a removed document."""
        place = bisect_right(self._starts[shard], pointer) - 1
        return place >= 0 and pointer < self._ends[shard][place]


def _places(index: Engine, copies: Copies, removed: Engine) -> Iterator[Place]:
    wanted: dict[bytes, Counter[bytes]] = defaultdict(Counter)
    for shard in removed.shards:
        for document in range(shard.documents):
            wanted[shard.content(document)][shard.metadata(document)] += 1
    for content, lines in wanted.items():
        yield from _choose(index, copies(content), lines)


def _choose(index: Engine, copies: list[Place], lines: Counter[bytes]) -> list[Place]:
    """As many of the copies as there are lines of metadata: those with these lines, if possible."""
    if len(copies) < lines.total():
        raise ManifestError(
            f"{index.declaration.removed_paths[0]}: a removed document is {lines.total()} times in the "
            f"indexes of removed documents, and {len(copies)} times in {index.declaration.path}: "
            f"{next(iter(lines))[:200].decode(errors='replace').strip()}"
        )
    if len(copies) == lines.total():
        return copies
    left = Counter(lines)
    chosen: list[Place] = []
    others: list[Place] = []
    for shard, document in copies:
        line = index.shards[shard].metadata(document)
        (chosen if left[line] > 0 else others).append((shard, document))
        left[line] -= 1
    return [*chosen, *others[: lines.total() - len(chosen)]]
