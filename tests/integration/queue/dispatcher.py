"""A dispatcher that records what it begins and starts, and runs nothing."""

from collections.abc import Sequence
from uuid import UUID

from app.queue.claim import Claim


class Dispatcher:
    """A worker that starts all results it is given."""

    def __init__(self, worker_id: UUID, room: int = 100) -> None:
        self.worker_id = worker_id
        self.room = room
        self.counts: list[int] = []
        self.begun: list[Claim] = []
        self.started: list[Claim] = []
        self.aborted = 0

    def reserve(self, results: Sequence[tuple[str, int]]) -> list[bool]:
        return [number < self.room for number in range(len(results))]

    def begin(self, claims: Sequence[Claim]) -> None:
        assert not self.begun, "one statement after another"
        self.begun += claims
        self.counts.append(len(claims))

    def confirm(self, worker_id: UUID, claims: Sequence[Claim]) -> None:
        assert worker_id == self.worker_id
        begun = {claim.id: claim for claim in self.begun}
        assert all(begun.get(claim.id, claim) == claim for claim in claims)
        self.begun.clear()
        self.started += claims

    def abort(self, worker_id: UUID) -> None:
        assert worker_id == self.worker_id
        self.begun.clear()
        self.aborted += 1
