"""Positions in streams: readers that come back with the id of any event, while attempts are lost.

Two processes: one runs the present attempt, both serve readers. A reader that was cut off at any event
and comes back to either process ends with exactly the text of the result. `FUZZ` is explained in
`tests/machines.py`.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from app.core.errors import Failure, FailureCode
from app.inference.triton_messages import Delta
from app.queue.claim import Claim
from app.queue.finish import AttemptEnd, AttemptOutcome
from app.results.rows import ResultRow
from app.results.store import ResultStore
from app.results.streams.hub import StreamHub
from app.results.streams.result_reader import (
    AttemptStarted,
    Ended,
    Event,
    KeepAlive,
    Position,
    ResultReader,
    TextDelta,
)
from app.worker.backends.triton_backend import Generation, TritonBackend
from tests.claims import claim_all
from tests.database_copies import DatabaseCopies
from tests.integration.queue.queue_bench import LOST
from tests.machines import DatabaseMachine, check_machine, loop_and_bench
from tests.postgres import PostgresServer

TEAM = "default"
TOKEN = bytes(4)
NOT_CONTINUED = Failure(FailureCode.NOT_CONTINUED, "It starts over.", True)
MAX_TOKENS = 40
ALL = 1_000  # events


@dataclass(frozen=True)
class Step:
    """A step, and what it may need."""

    kind: str
    tokens: Sequence[str]  # generated before; some are half a character and have no text
    is_stored: bool
    has_ids: bool
    place: int
    which: int
    count: int  # of events
    is_noticed: bool


KINDS = (
    *["connect"] * 6, *["read"] * 3, *["lose worker"] * 4, *["lose engine"] * 2, "hand back", "claim",
    "start over", "generate in vain", "notice", "return all", "disconnect", "complete", "cancel",
)  # fmt: skip
steps = st.builds(
    Step,
    kind=st.sampled_from(KINDS),
    # Each `?` becomes a character of its own: no two texts are alike.
    tokens=st.lists(st.sampled_from(["?", "?é", "€😀?", ""]), max_size=3),
    is_stored=st.booleans(),
    has_ids=st.sampled_from([True] * 8 + [False]),
    place=st.integers(0, 1),
    which=st.integers(0, 9),
    count=st.sampled_from([1, 2, 3, ALL]),
    is_noticed=st.booleans(),
)


@dataclass
class Known:
    """State of a client: its position, the text, and the tokens if it reads those."""

    position: Position = field(default_factory=Position)
    text: str = ""
    tokens: list[Any] = field(default_factory=list)

    def after(self, event: AttemptStarted | TextDelta) -> "Known":
        if isinstance(event, AttemptStarted):
            kept = event.continued_from or 0
            assert kept == event.position.offset <= len(self.text)
            return Known(event.position, self.text[:kept])
        known = Known(event.position, self.text + event.text, [*self.tokens, *event.tokens])
        assert known.position == Position(self.position.attempt, len(known.text))
        return known


@dataclass(eq=False)
class Client:
    """A client that reads, and all that it knew after each event."""

    known: Known
    events: AsyncGenerator[Event, None]
    has_ended: bool = False


class StreamMachine(DatabaseMachine):
    """One result: its attempts in two processes, and its readers."""

    @initialize(resumable=st.sampled_from([True, True, False]), place=st.integers(0, 1))
    def begin(self, resumable: bool, place: int) -> None:
        self.resumable = resumable  # else its readers read tokens, too
        self.model = f"m-{uuid4()}"
        self.results = ResultStore(self.bench.database, self.bench.queue, self.bench.settings)
        self.hubs = [
            StreamHub(self.bench.database, self.results, self.bench.settings) for _ in range(2)
        ]
        self.attempt: Generation | None = None  # that may write
        self.place = 0  # the process that runs it
        self.zombies: list[tuple[StreamHub, Generation]] = []  # whose loss is not noticed there
        self.full: dict[int, Generation] = {}  # every attempt, by its number
        self.tokens = 0
        self.clients: list[Client] = []
        self.past = [Known()]
        self.row: ResultRow | None = None  # of the ended result
        parameters = f'{{"max_tokens": {MAX_TOKENS}}}'
        (self.id,) = self.run(
            self.bench.add(model_name=self.model, resumable=resumable, parameters=parameters)
        )
        self.worker: UUID = self.run(self.bench.worker())
        self.run(self._claim(place))

    @rule(step=steps)
    def act(self, step: Step) -> None:
        """One rule for all: hypothesis leaves half of several rules out of each example."""
        self.run(self._act(step))

    def teardown(self) -> None:
        if hasattr(self, "clients"):
            self.run(self._check_all())

    async def _act(self, step: Step) -> None:
        if step.kind == "generate in vain" and self.zombies:
            await self._generate(step, self.zombies[0][1])
        elif self.attempt is not None:
            await self._generate(step, self.attempt)
        if step.kind in ("connect", "read", "disconnect", "return all"):
            await self._act_as_client(step)
        elif step.kind == "notice":
            self._notice()
        elif step.kind == "cancel" and self.row is None and len(self.full) > 3:
            await self._cancel()
        elif step.kind == "claim" and self.row is None and self.attempt is None:
            await self._claim(step.place)
        elif self.attempt is not None:
            await self._act_as_worker(step, self.attempt)

    async def _act_as_client(self, step: Step) -> None:
        if step.kind == "connect":  # at a past position, or at the beginning
            known = self.past[-1 - step.which % len(self.past)] if self.resumable else Known()
            self.clients.append(self._client(step.place, known))
            await self._read(self.clients[-1], step.count)
        elif step.kind == "return all":
            await self._return_all()
        elif self.clients and step.kind == "read":
            await self._read(self.clients[step.which % len(self.clients)], step.count)
        elif self.clients:
            await self.clients.pop(0).events.aclose()

    async def _act_as_worker(self, step: Step, attempt: Generation) -> None:
        if step.kind == "lose worker":
            await self._lose_worker(attempt, is_noticed=step.is_noticed)
        elif step.kind == "lose engine":
            await self._end(AttemptOutcome.LOST, LOST)
        elif step.kind == "hand back":
            await self._end(AttemptOutcome.RETURNED, None)
        elif step.kind == "start over" and attempt.claim.resume is not None:
            attempt.starts_over = True
            await self._end(AttemptOutcome.RETURNED, NOT_CONTINUED)
        elif step.kind == "complete" and len(self.full) > 3:
            await self._end(AttemptOutcome.COMPLETED, None)
        if self.row is None and self.attempt is None:
            await self._claim(step.place)

    def _notice(self) -> None:
        for hub, attempt in self.zombies:
            hub.detach(attempt)
        self.zombies.clear()

    async def _claim(self, place: int) -> None:
        await self.bench.fast_forward()
        queue = self.bench.queue
        claims: list[Claim] = await claim_all(queue, self.worker, {self.model: 1})
        claims = claims or await queue.claim_suspects(self.worker, [self.model])
        (claim,) = claims
        attempt = Generation(claim, cast(TritonBackend, None), self.hubs[place].on_text)
        self.attempt, self.place = attempt, place
        self.full[claim.attempt] = attempt
        self.hubs[place].attach(attempt)
        if claim.resume is not None and claim.resume.fault is not None:
            attempt.starts_over = True
            await self._end(AttemptOutcome.RETURNED, NOT_CONTINUED)

    async def _generate(self, step: Step, attempt: Generation) -> None:
        for text in step.tokens[: MAX_TOKENS - attempt.completion_tokens]:
            self.tokens += 1
            logprobs = None if self.resumable else f'[{{"{self.tokens}": {{"logprob": -1.0}}}}]'
            ids = TOKEN if step.has_ids else None
            own = text.replace("?", chr(0x4E00 + self.tokens))
            attempt._on_delta(Delta(own, None, 3, 1, logprobs, 1, ids))
        if step.is_stored and (chunk := attempt.take_chunk()):
            worker = self.worker if attempt is self.attempt else uuid4()
            await self.bench.queue.append(worker, [chunk])

    async def _lose_worker(self, attempt: Generation, *, is_noticed: bool) -> None:
        self.zombies.append((self.hubs[self.place], attempt))
        self.attempt = None
        if is_noticed:
            self._notice()
        await self.bench.connection.execute(
            "UPDATE workers SET lease_expires_at = now() - interval '1 s' WHERE id = $1",
            self.worker,
        )
        assert await self.bench.queue.rescue(0.0) == 1
        self.worker = await self.bench.worker()
        await self._look()

    async def _end(self, outcome: AttemptOutcome, failure: Failure | None) -> None:
        """End the attempt as its worker does."""
        assert self.attempt is not None
        attempt, hub = self.attempt, self.hubs[self.place]
        attempt.is_over = True
        if outcome is AttemptOutcome.COMPLETED:
            attempt.finish_reason = "stop"
        end: AttemptEnd = attempt._end(outcome, failure)
        if end.keeps_text and (chunk := attempt.take_chunk(is_last=True)):
            await self.bench.queue.append(self.worker, [chunk])
        batcher = self.bench.queue.end_batcher(self.worker, 60.0, hub)
        assert await batcher.submit(end)
        self.attempt = None
        hub.detach(attempt)
        await self._look()

    async def _cancel(self) -> None:
        assert await self.bench.queue.cancel(TEAM, id=self.id) == 1
        if self.attempt is not None:
            await self._end(AttemptOutcome.FAILED, Failure(FailureCode.CANCELLED, "x", False))
        await self._look()

    async def _look(self) -> None:
        row = await self.results.get(TEAM, self.id)
        if row.state != "pending":
            self.row = row
            for hub in self.hubs:
                hub._on_ended(self.id.hex)

    async def _return_all(self) -> None:
        if not self.resumable:
            return
        for known in {str(one.position): one for one in self.past}.values():
            for place in (0, 1):
                client = self._client(place, known)
                await self._read(client)
                await client.events.aclose()

    def _client(self, place: int, known: Known) -> Client:
        reader = ResultReader(
            self.hubs[place],
            self.results,
            TEAM,
            self.id,
            known.position,
            silence_seconds=0.0,
            continues=self.resumable,
            with_tokens=not self.resumable,
        )
        return Client(known, reader.events())

    async def _read(self, client: Client, count: int = ALL) -> None:
        for _ in range(count):
            event = await anext(client.events, None)
            if event is None:
                assert client.has_ended, "a stream ended before its result"
                return
            if isinstance(event, KeepAlive):
                return
            if isinstance(event, Ended):
                client.has_ended = True
                client.known = Known(event.position, client.known.text, client.known.tokens)
                self._check_end(client, event.row)
            else:
                client.known = client.known.after(event)
                generated = str(self.full[client.known.position.attempt].text)
                assert generated.startswith(client.known.text)
            self.past.append(client.known)

    def _check_end(self, client: Client, row: ResultRow) -> None:
        tokens = row.token_logprobs()
        if row.state == "completed":
            assert client.known.text == row.text
            assert client.known.tokens == tokens
            assert row.text == str(self.full[row.attempt].text)
        else:  # a lost worker stored less than it had delivered
            assert client.known.text.startswith(row.text)
            assert client.known.tokens[: len(tokens)] == tokens

    async def _check_all(self) -> None:
        """End the result, and have every client, and one at each past position, read to the end."""
        self._notice()
        await self._return_all()
        while self.row is None:
            if self.attempt is None:
                await self._claim(1)
            else:
                await self._end(AttemptOutcome.COMPLETED, None)
        if self.resumable:
            past = {str(one.position): one for one in self.past}.values()
            self.clients += [self._client(n % 2, known) for n, known in enumerate(past)]
        for client in self.clients:
            while not client.has_ended:
                await self._read(client)
            await client.events.aclose()


@pytest.mark.slow("draws sequences of all events; `make soak` draws FUZZ times as many")
@pytest.mark.soak
def test_a_reader_at_any_position_gets_the_whole_text_once(
    postgres_server: PostgresServer, database_copies: DatabaseCopies
) -> None:
    with loop_and_bench(postgres_server, database_copies, max_attempts=5) as (loop, bench):
        StreamMachine.loop, StreamMachine.bench = loop, bench
        check_machine(StreamMachine, examples=70, steps=15)
