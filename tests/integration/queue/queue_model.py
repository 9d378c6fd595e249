"""A plain model of the queue: docs/state_machine.md and docs/limits.md in Python.

It holds what the tables should hold. Times are seconds of the database's clock, from 0 on. Each method
is one statement of `app/queue/`; `events` collects the notifications that it sends.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal
from uuid import UUID

from app.core.listener import APPENDED, CANCELLED, ENDED, ENQUEUED, WEBHOOKS
from app.queue.enqueue import NewResult
from app.queue.finish import AttemptEnd
from app.queue.progress import Chunk
from tests.integration.queue.result_model import SUSPECT, Answer, Entry, Modelled, ModelledWorker

Cause = Literal["completed", "failed", "lost", "returned", "worker_lost", "worker_left"]
_LONGEST_LEASE = 1200.0
_MAX_HISTORY = 20


@dataclass(slots=True)
class QueueModel:
    max_attempts: int
    continues: bool = True
    by_text: bool = False
    now: float = 0.0
    results: dict[UUID, Modelled] = field(default_factory=dict)
    workers: dict[UUID, ModelledWorker] = field(default_factory=dict)
    contexts: dict[UUID, str] = field(default_factory=dict)  # to their teams
    keys: dict[tuple[str, str], tuple[UUID, float]] = field(default_factory=dict)
    events: set[tuple[str, str]] = field(default_factory=set)

    def start_worker(self, worker: UUID, lease_seconds: float) -> None:
        self.workers[worker] = ModelledWorker(self.now + lease_seconds)

    def living(self) -> list[UUID]:
        return [key for key, one in self.workers.items() if one.dead_at is None]

    def renew(self, worker: UUID, lease_seconds: float) -> None:
        if self.workers[worker].dead_at is None:
            self.workers[worker].lease_ends = self.now + lease_seconds

    def select(self, **members: object) -> list[Modelled]:
        """Return results by their members, or those of what was sent."""
        return [
            one
            for one in self.results.values()
            if all(
                getattr(one if hasattr(one, name) else one.sent, name) == value
                for name, value in members.items()
            )
        ]

    # --- new results ----------------------------------------------------------------------------

    def enqueue(
        self, sent: Sequence[NewResult], worker: UUID | None = None, room: int = 0
    ) -> list[Modelled]:
        """Store results; return those that `worker`, with so many free slots, runs at once."""
        in_order = sorted(sent, key=lambda one: -one.priority)
        slots = {one.id for one in in_order[:room] if one.limits.max_running is None}
        refused = self._take_keys(sent)
        missing = {one.id for one in sent if not self._has_context(one)}
        spoiled = {one.context_id for one in sent if {one.id, one.group_id} & refused}
        for one in sent:
            if one.new_context is not None and one.context_id not in spoiled:
                self.contexts[one.context_id] = one.team_id
        stored = [
            one
            for one in sorted(sent, key=lambda one: one.id)
            if not {one.id, one.group_id} & refused and one.id not in missing | set(self.results)
        ]
        idle = {
            one.model_name
            for one in stored
            if self._is_alive(worker)
            and not self._queued(one.model_name)
            and not self._has_suspect(one.model_name)
        }
        keys = self._next_keys(stored)
        started = []
        for one in stored:
            made = Modelled(one, self.now + one.deadline_seconds, keys[one.id])
            self.results[one.id] = made
            if one.id in slots and one.model_name in idle:
                made.worker, made.attempt = worker, 1
                started.append(made)
            else:
                self.events.add((ENQUEUED, one.model_name))
        return started

    def _has_context(self, one: NewResult) -> bool:
        return one.new_context is not None or self.contexts.get(one.context_id) == one.team_id

    def _take_keys(self, sent: Sequence[NewResult]) -> set[UUID]:
        """Return the results whose key is another's."""
        refused = set()
        for one in sorted(sent, key=lambda one: one.id):
            if one.key is None:
                continue
            place = one.team_id, one.key.key
            is_free = place not in self.keys or self.keys[place][1] <= self.now
            if is_free and self._has_context(one):
                self.keys[place] = one.id, self.now + one.key.seconds
            else:
                refused.add(one.id)
        return refused

    def _next_keys(self, stored: Sequence[NewResult]) -> dict[UUID, float]:
        """Return the virtual time of each new result."""
        groups: dict[tuple[str, str, int], list[NewResult]] = {}
        for one in stored:
            groups.setdefault((one.team_id, one.model_name, one.priority), []).append(one)
        keys = {}
        for (team, model, priority), group in groups.items():
            step = 1 / group[0].limits.weight
            queue = self._queued(model, priority)
            own = [one.fair_key for one in queue if one.sent.team_id == team]
            first = max([0.0, *(key + step for key in own), self._head(model, priority) or 0.0])
            keys.update({one.id: first + step * place for place, one in enumerate(group)})
        return keys

    def _queued(self, model: str, priority: int | None = None) -> list[Modelled]:
        return [
            one
            for one in self.results.values()
            if one.is_queued
            and one.sent.model_name == model
            and priority in (None, one.sent.priority)
        ]

    def _head(self, model: str, priority: int) -> float | None:
        return min((one.fair_key for one in self._queued(model, priority)), default=None)

    # --- claims ---------------------------------------------------------------------------------

    def claim(
        self, worker: UUID, model: str, free: int, running_limits: Mapping[str, int] | None = None
    ) -> list[Modelled]:
        """Claim the first results of a model; `running_limits` of its teams, if it has any."""
        if not self._is_alive(worker) or self._has_suspect(model):
            return []
        queue = [one for one in self._queued(model) if self._may_start(one)]
        left = dict(running_limits or {})
        for one in self.results.values():
            if one.is_running and one.sent.model_name == model and one.sent.team_id in left:
                left[one.sent.team_id] -= 1
        claimed: list[Modelled] = []
        for one in sorted(queue, key=lambda one: one.place):
            if len(claimed) < free and left.get(one.sent.team_id, 1) > 0:
                if one.sent.team_id in left:
                    left[one.sent.team_id] -= 1
                self._start(one, worker)
                claimed.append(one)
        return claimed

    def claim_suspects(self, worker: UUID, models: Iterable[str]) -> list[Modelled]:
        claimed = []
        for model in models:
            of_model = [one for one in self.results.values() if one.sent.model_name == model]
            suspects = [
                one for one in of_model if one.is_suspect and one.is_queued and self._may_start(one)
            ]
            if self._is_alive(worker) and not any(one.is_running for one in of_model):
                for one in sorted(suspects, key=lambda one: one.sent.id)[:1]:
                    self._start(one, worker)
                    claimed.append(one)
        return claimed

    def _may_start(self, one: Modelled) -> bool:
        return one.not_before is None or one.not_before <= self.now

    def _is_alive(self, worker: UUID | None) -> bool:
        return worker is not None and self.workers[worker].dead_at is None

    def _has_suspect(self, model: str) -> bool:
        """One that runs, or that has its turn."""
        return any(
            one.is_suspect
            and one.sent.model_name == model
            and (one.is_running or self._may_start(one))
            for one in self.results.values()
        )

    def _start(self, one: Modelled, worker: UUID) -> None:
        one.worker, one.attempt, one.not_before = worker, one.attempt + 1, None

    # --- running attempts -----------------------------------------------------------------------

    def append(self, worker: UUID, chunks: Sequence[Chunk], watched: Sequence[UUID]) -> None:
        for chunk in chunks:
            one = self.results[chunk.result_id]
            if self._is_ours(one, worker, chunk.attempt):
                one.chunks.append(chunk)
        if self.workers[worker].dead_at is None:
            self.events |= {(APPENDED, one.hex) for one in watched}

    def end(self, worker: UUID, ends: Sequence[AttemptEnd], *, resent: bool) -> list[bool]:
        """End attempts; whether each was the worker's, or `resent`, may have been."""
        ours = [self._is_ours(self.results[one.result_id], worker, one.attempt) for one in ends]
        heads = self._heads()
        for end, is_ours in zip(ends, ours, strict=True):
            if is_ours:
                answer = Answer(
                    end.output, end.prompt_tokens, end.completion_tokens, end.finish_reason,
                    end.failure.code if end.failure else None, end.keeps_text, end.continued,
                    end.continued_from, end.retry_after_seconds,
                )  # fmt: skip
                self._conclude(self.results[end.result_id], end.outcome.value, answer, heads)
        return [
            is_ours or (resent and self._may_have_ended(self.results[end.result_id], worker, end))
            for end, is_ours in zip(ends, ours, strict=True)
        ]

    def _may_have_ended(self, one: Modelled, worker: UUID, end: AttemptEnd) -> bool:
        has_ended = one.state != "pending" and one.worker == worker
        return one.attempt == end.attempt and (has_ended or one.worker is None)

    def _is_ours(self, one: Modelled, worker: UUID, attempt: int) -> bool:
        return one.is_running and one.worker == worker and one.attempt == attempt

    def _verdict(self, one: Modelled, cause: Cause, answer: Answer) -> str | None:
        """Return the error that ends a result, "" for its completion, None for the queue."""
        if one.is_cancelled:
            return "cancelled"
        if cause in ("completed", "failed"):
            return "" if cause == "completed" else answer.error
        if one.deadline <= self.now:
            return "deadline_exceeded"
        is_last = one.lost_attempts + 1 >= self.max_attempts
        if cause == "lost" and is_last:
            return "engine_crashed" if one.engine_deaths >= SUSPECT else answer.error
        if cause == "worker_lost" and (is_last or one.sent.on_disconnect == "cancel"):
            return "worker_lost"
        return None

    def _conclude(
        self, one: Modelled, cause: Cause, answer: Answer, heads: Mapping[tuple[str, int], float]
    ) -> None:
        verdict = self._verdict(one, cause, answer)
        counted = cause in ("lost", "worker_lost")
        if (answer.error or answer.continued_from is not None) and len(one.history) < _MAX_HISTORY:
            entry = one.attempt, one.worker, counted or verdict == "", answer.continued_from
            one.history.append(Entry(*entry, answer.error))
        one.lost_attempts += counted
        # No worker here has a session: its process is gone. Its first death raises no suspicion.
        one.engine_deaths += cause == "lost" or (counted and one.lost_attempts > 1)
        one.continuations += answer.continued
        if verdict is not None:
            self._finish(one, verdict, answer)
            return
        one.fair_key = heads.get((one.sent.model_name, one.sent.priority), 0.0)
        one.not_before = self.now + answer.pause
        if not (answer.keeps_text and one.sent.resumable):
            one.text_attempt, one.continuations = None, 0
        elif one.text_attempt is None and answer.text:
            one.text_attempt = one.attempt
        if one.text_attempt is None:
            one.chunks.clear()
        one.worker = None

    def _finish(self, one: Modelled, verdict: str, answer: Answer) -> None:
        one.state = "failed" if verdict else "completed"
        one.is_cancelled |= verdict == "cancelled"
        answer.error = verdict or None
        if verdict:
            answer.finish_reason = "cancelled" if verdict == "cancelled" else "error"
        one.answer = answer
        one.not_before = None
        one.chunks.clear()
        one.ends += 1
        self.events.add((ENDED, one.sent.id.hex))
        if one.sent.webhook_url is not None:
            self.events.add((WEBHOOKS, ""))

    def _heads(self) -> dict[tuple[str, int], float]:
        flows = {(one.sent.model_name, one.sent.priority) for one in self.results.values()}
        heads = {flow: self._head(*flow) for flow in flows}
        return {flow: head for flow, head in heads.items() if head is not None}

    # --- cancellation, expiry, rescue -----------------------------------------------------------

    def cancel(self, results: Sequence[Modelled]) -> int:
        pending = [one for one in results if one.state == "pending"]
        for one in pending:
            if one.is_running:
                one.is_cancelled = True
                self.events.add((CANCELLED, one.sent.id.hex))
            else:
                self._finish_queued(one, "cancelled")
        return len(pending)

    def expire(self) -> int:
        late = [one for one in self.results.values() if one.is_queued and one.deadline <= self.now]
        for one in late:
            self._finish_queued(one, "deadline_exceeded")
        return len(late)

    def _finish_queued(self, one: Modelled, verdict: str) -> None:
        kept = one.kept_answer() if one.text_attempt is not None else Answer()
        self._finish(one, verdict, kept)

    def mark_lost_workers(self) -> None:
        for worker in self.workers.values():
            is_over = not 0 <= worker.lease_ends - self.now <= _LONGEST_LEASE
            if is_over and worker.dead_at is None:
                worker.dead_at = self.now

    def rescue(self, *, marks: bool) -> int:
        if marks:
            self.mark_lost_workers()
        return self._release([key for key, one in self.workers.items() if one.dead_at is not None])

    def retire(self, worker: UUID) -> int:
        if self.workers[worker].dead_at is None:
            self.workers[worker].dead_at = self.now
        return self._release([worker], "worker_left")

    def _release(self, workers: Sequence[UUID], cause: Cause = "worker_lost") -> int:
        found = [one for one in self.results.values() if one.is_running and one.worker in workers]
        heads = self._heads()
        ran_alone = [one for one in found if one.is_suspect]
        for one in found:
            self._conclude(one, cause, self._stored_answer(one, cause), heads)
        for one in ran_alone:
            queued = self._queued(one.sent.model_name)
            for other in queued if not all(other.is_suspect for other in queued) else ():
                other.pause_if_suspect(one.sent.team_id, self.now)
        if found:
            self.events.add((ENQUEUED, ""))
        return len(found)

    def _stored_answer(self, one: Modelled, cause: Cause) -> Answer:
        """The answer of an attempt whose worker left: its chunks."""
        answer, chunks = one.kept_answer(), one.kept()
        ids = sum(len(chunk.token_ids or b"") for chunk in chunks)
        has_ids = ids == 4 * (answer.completion_tokens or 0)
        answer.error = "worker_lost" if cause == "worker_lost" else None
        answer.keeps_text = self.continues and (self.by_text or has_ids)
        earlier = [chunk for chunk in chunks if chunk.attempt < one.attempt]
        answer.continued = one.text_attempt is not None and len(earlier) < len(chunks)
        if earlier:
            answer.continued_from = max(chunk.offset + len(chunk.text) for chunk in earlier)
        return answer
