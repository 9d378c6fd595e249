"""Idempotency keys over two processes: any order of requests, expiry, erasure and deletion.

The model is a dictionary: a key names one result and one request until it expires or the result is
deleted. `FUZZ` is explained in `tests/machines.py`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import UUID, uuid4

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from app.api.container import Services
from app.auth.principal import Principal
from app.core.errors import ErasedError, IdempotencyConflictError, ServiceError
from app.core.ids import new_id
from app.inference.model_registry import Model
from app.inference.server_pool import ServerPool
from app.results.drafts import GroupRequest, Prompt
from app.results.replays import Replayed, ReplayedRow
from app.results.requests import ResultCreate, SendOptions
from app.results.submission import Accepted, SubmissionOutcome
from tests.database_copies import DatabaseCopies
from tests.integration.queue.queue_bench import MODEL
from tests.machines import DatabaseMachine, check_machine, loop_and_bench
from tests.postgres import PostgresServer

# A request: its key, its prompt, and how many results it has. Several go over another route.
Request = tuple[str | None, str, int]
requests = st.tuples(
    st.sampled_from(["k", "l", None]), st.sampled_from("ab"), st.sampled_from([1, 2])
)
places = st.integers(0, 1)
Outcome = Sequence[SubmissionOutcome] | ServiceError


@dataclass
class Taken:
    """The request that has a key, and its results."""

    request: Request
    ids: list[UUID]


class KeyMachine(DatabaseMachine):
    """One team, whose requests go to two processes."""

    services: ClassVar[Sequence[Services]]

    @initialize()
    def begin(self) -> None:
        self.team = f"team-{uuid4()}"
        self.principal = Principal(self.team, frozenset({"use"}))
        self.taken: dict[str, Taken] = {}
        self.stored: set[UUID] = set()
        self.ended: set[UUID] = set()
        self.erased: set[UUID] = set()

    # --- requests -----------------------------------------------------------------------------------

    @rule(place=places, request=requests)
    def post(self, place: int, request: Request) -> None:
        self.check_together([request], self.run(self._send_all([(place, request)])))

    @rule(sent=st.lists(st.tuples(places, requests), min_size=2, max_size=4))
    def post_together(self, sent: list[tuple[int, Request]]) -> None:
        outcomes = self.run(self._send_all(sent))
        self.check_together([request for _, request in sent], outcomes)

    @rule(place=places, sent=st.lists(requests, min_size=1, max_size=4))
    def post_list(self, place: int, sent: list[Request]) -> None:
        singles = [(key, content, 1) for key, content, _ in sent]
        creates = [
            ResultCreate(model=MODEL, content=content, idempotency_key=key)
            for key, content, _ in singles
        ]
        answers = self.run(self.services[place].submissions.submit_all(self.principal, creates))
        # None is a row of a job.
        outcomes = [
            one if isinstance(one, ServiceError) else [one]
            for one in answers
            if not isinstance(one, ReplayedRow)
        ]
        self.check_together(singles, outcomes)

    # --- what happens to keys and results ----------------------------------------------------------

    @rule(which=st.integers(0, 3))
    def expire(self, which: int) -> None:
        key = self._key(which)
        self.taken.pop(key, None)
        self.run(
            self.bench.database.fetch(
                "UPDATE idempotency_keys SET expires_at = now() WHERE team_id = $1 AND key = $2",
                self.team,
                key,
            )
        )

    @rule(place=places)
    def remove_expired(self, place: int) -> None:
        self.run(self.services[place].keys.remove_expired())

    @rule(which=st.integers(0, 3))
    def end(self, which: int) -> None:
        ids = self._ids(which)
        for result_id in ids:
            self.run(self.bench.queue.cancel(self.team, id=result_id))
        self.ended.update(ids)

    @rule(which=st.integers(0, 3), place=places)
    def erase(self, which: int, place: int) -> None:
        ids = self._ids(which)
        self.run(self.services[place].erasure.erase(ids))
        # Only requests for several are sent with `store=False`.
        self.erased.update({*ids} & self.ended if len(ids) > 1 else ())

    @rule(which=st.integers(0, 3), place=places)
    def delete(self, which: int, place: int) -> None:
        first = self._ids(which)[:1]
        self.taken.pop(self._key(which), None)  # others of its group stay
        self._delete(place, first)

    @rule(place=places)
    def delete_second(self, place: int) -> None:
        seconds = [one.ids[1] for one in self.taken.values() if len(one.ids) > 1]
        self._delete(place, [one for one in seconds if one in self.stored])

    def teardown(self) -> None:
        if hasattr(self, "team"):
            self.run(self._check_rows())

    # --- the model ----------------------------------------------------------------------------------

    def check_together(self, sent: Sequence[Request], outcomes: Sequence[Outcome]) -> None:
        """Outcomes of requests that were sent at once: those of some order of them."""
        for request, outcome in zip(sent, outcomes, strict=True):  # the first of a key takes it
            if not isinstance(outcome, ServiceError) and isinstance(outcome[0], Accepted):
                ids = [one.result_id for one in outcome]
                assert len(ids) == request[2]
                assert not {*ids} & self.stored
                self.stored.update(ids)
                if request[0] is not None:
                    assert request[0] not in self.taken, "a key names two results"
                    self.taken[request[0]] = Taken(request, ids)
        for request, outcome in zip(sent, outcomes, strict=True):
            if isinstance(outcome, ServiceError) or isinstance(outcome[0], Replayed):
                assert request[0] is not None
                self.check_repetition(request, self.taken[request[0]], outcome)

    def check_repetition(self, request: Request, taken: Taken, outcome: Outcome) -> None:
        gone = [one for one in taken.ids if one not in self.stored]
        if request != taken.request or (gone and taken.ids[0] not in self.erased):
            assert isinstance(outcome, IdempotencyConflictError)
            assert outcome.extra == {"result_id": str(taken.ids[0])}
        elif {*taken.ids} & self.erased:
            assert isinstance(outcome, ErasedError)
        else:
            assert not isinstance(outcome, ServiceError)
            assert [one.result_id for one in outcome] == taken.ids
            for one in outcome:
                assert isinstance(one, Replayed)
                assert (one.row.state == "failed") == (one.result_id in self.ended)

    # --- what the rules do --------------------------------------------------------------------------

    def _key(self, which: int) -> str:
        return sorted(self.taken)[which % len(self.taken)] if self.taken else ""

    def _ids(self, which: int) -> list[UUID]:
        taken = self.taken.get(self._key(which))
        return taken.ids if taken else []

    def _delete(self, place: int, ids: Sequence[UUID]) -> None:
        self.stored.difference_update(ids)
        for one in ids:
            self.run(self.services[place].results.delete(self.team, one, force=True))

    async def _send_all(self, sent: Sequence[tuple[int, Request]]) -> list[Outcome]:
        return await asyncio.gather(*(self._send(place, request) for place, request in sent))

    async def _send(self, place: int, request: Request) -> Outcome:
        submissions = self.services[place].submissions
        key, content, count = request
        try:
            if count == 1:
                create = ResultCreate(model=MODEL, content=content, idempotency_key=key)
                return [await submissions.submit(self.principal, create, new_id())]
            options = SendOptions(idempotency_key=key)
            group = GroupRequest(MODEL, [Prompt(content)], options, count, store=False)
            ids = [new_id() for _ in range(count)]
            return await submissions.submit_group(self.principal, group, ids)
        except ServiceError as error:
            return error

    async def _check_rows(self) -> None:
        connection = self.bench.connection
        rows = await connection.fetch("SELECT id FROM results WHERE team_id = $1", self.team)
        assert {row["id"] for row in rows} == self.stored
        keys = await connection.fetch(
            "SELECT key, result_id FROM idempotency_keys WHERE team_id = $1 AND expires_at > now()",
            self.team,
        )
        found: dict[str, Any] = {row["key"]: row["result_id"] for row in keys}
        assert found == {key: taken.ids[0] for key, taken in self.taken.items()}
        orphans = await connection.fetch(
            """SELECT FROM contexts c WHERE team_id = $1 AND unused_since IS NULL
               AND NOT EXISTS (SELECT FROM results WHERE context_id = c.id)""",
            self.team,
        )
        assert orphans == []


@pytest.mark.slow("draws sequences of all events; `make soak` draws FUZZ times as many")
@pytest.mark.soak
def test_a_key_names_one_request_and_its_results(
    postgres_server: PostgresServer, database_copies: DatabaseCopies
) -> None:
    with loop_and_bench(postgres_server, database_copies) as (loop, bench):

        async def open_services() -> Services:
            pool = ServerPool(bench.database, bench.settings)
            services = Services(bench.settings, bench.database, pool)
            # As if Triton had been seen with it: what is accepted does not depend on Triton.
            services.registry._models = {MODEL: Model(MODEL, 1, True, "", None)}
            return services

        KeyMachine.loop, KeyMachine.bench = loop, bench
        KeyMachine.services = [loop.run_until_complete(open_services()) for _ in range(2)]
        check_machine(KeyMachine, examples=60, steps=20)
