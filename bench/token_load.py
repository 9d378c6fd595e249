"""Results that all run at the same time, 50 tokens a second each: unread, read, or without the service.

The script is silent until all results have begun. Its chunks hold the times of the steps that made them, one a token.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import orjson
import uvloop

from bench.load import get, post
from bench.servers import MODEL, House
from bench.sse_readers import read_streams
from bench.streams import (
    EVENT_STREAM,
    PARAMETERS,
    DirectClient,
    HttpClient,
    Stream,
    http_clients,
    submission,
)
from bench.windows import Reading, record

TOKENS_A_SECOND = 50
_QUIET_SECONDS = 1.5  # at the least, while the results begin
_QUIET_SECONDS_EACH = 0.004
_MARGIN_SECONDS = 1.5  # tokens before and after the window
_POLL_SECONDS = 0.5
_LATE_SECONDS = 240.0  # of results whose model or service does not keep up


@dataclass(slots=True, frozen=True)
class TokenLoad:
    """So many results at a time, with so many seconds of tokens in the window's planned length."""

    results: int
    seconds: float

    @property
    def tokens(self) -> int:
        """Tokens of one result."""
        most = int(PARAMETERS["max_tokens"])
        return min(most, int((self.seconds + 2 * _MARGIN_SECONDS) * TOKENS_A_SECOND))

    @property
    def nominal_rate(self) -> float:
        return float(self.results * TOKENS_A_SECOND)

    @property
    def quiet_seconds(self) -> float:
        return _QUIET_SECONDS + self.results * _QUIET_SECONDS_EACH

    @property
    def prompt(self) -> str:
        quiet, delay = self.quiet_seconds * 1000, 1000 / TOKENS_A_SECOND
        return (
            f"{{{{clock chunks={self.tokens} first_delay_ms={quiet:.0f} delay_ms={delay:.0f}}}}} go"
        )


async def unread(port: int, load: TokenLoad) -> list[Stream]:
    """Results of one list, which no client asks for before they should have ended."""
    item: dict[str, object] = {"model": MODEL, "content": load.prompt, "parameters": PARAMETERS}
    length = load.quiet_seconds + load.tokens / TOKENS_A_SECOND
    streams = await submit_unread(port, [item] * load.results, length)
    for stream in streams:
        stream.made = [int(token) for token in stream.result["result"].split()]
    return _whole(load, streams)


async def submit_unread(
    port: int, items: Sequence[dict[str, object]], seconds: float = 0
) -> list[Stream]:
    """Submit a list; its terminal results, polled one after another, not before so many seconds.

    Raises RuntimeError for a result that is not completed.
    """
    async with http_clients(port, 1) as (client,):
        began = time.monotonic_ns()
        accepted = orjson.loads((await client.ask(post("/results/", orjson.dumps(items)))).body)
    await asyncio.sleep(seconds)
    async with http_clients(port, 1) as (client,), asyncio.timeout(_LATE_SECONDS):
        results = [await _ended(client, one["id"]) for one in accepted]
    for result in results:
        if result["state"] != "completed":
            raise RuntimeError(f"not completed: {result}")
    return [Stream(began, result=result) for result in results]


async def _ended(client: HttpClient, identifier: str) -> dict[str, object]:
    while True:
        result: dict[str, object] = orjson.loads(
            (await client.ask(get(f"/results/{identifier}"))).body
        )
        if result["state"] not in ("pending", "running"):
            return result
        await asyncio.sleep(_POLL_SECONDS)


async def streamed(port: int, load: TokenLoad, processes: int) -> list[Stream]:
    """Results whose POSTs are answered with their streams, read by so many processes."""
    request = submission(load.prompt, f"Accept: {EVENT_STREAM}\r\n")
    return _whole(load, await read_streams(port, [request] * load.results, processes))


async def bare(house: House, load: TokenLoad) -> tuple[list[Stream], list[Reading]]:
    """One gRPC stream a result, by a process that does nothing else; readings of it and of Triton."""
    with tempfile.TemporaryFile() as output:  # a pipe of uvloop has once lost the end
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.token_load"),
            *(house.triton_address, str(load.results), load.prompt),
            stdout=output,
            cwd=Path(__file__).parents[1],
            env=os.environ | house.triton.environment,
        )
        parts = {"client": process.pid, "triton": house.triton_pid}
        status, readings = await record(parts, process.wait())
        if status != 0:
            raise RuntimeError("the bare client failed; see above")
        output.seek(0)
        streams = [Stream(**stream) for stream in orjson.loads(output.read())]
    return _whole(load, streams), readings


def _whole(load: TokenLoad, streams: list[Stream]) -> list[Stream]:
    """The same streams; raises RuntimeError if tokens are missing."""
    lengths = {len(stream.made) for stream in streams}
    if lengths != {load.tokens} or len(streams) != load.results:
        raise RuntimeError(f"{len(streams)} streams of {lengths} tokens")
    return streams


async def _main(address: str, count: int, prompt: str) -> Sequence[Stream]:
    async with grpc.aio.insecure_channel(address) as channel:
        client = DirectClient(channel, os.environ["LLM_TRITON_SECRET"])
        return await asyncio.gather(*(client.read(prompt) for _ in range(count)))


if __name__ == "__main__":
    address, count, prompt = sys.argv[1:]
    sys.stdout.buffer.write(orjson.dumps(uvloop.run(_main(address, int(count), prompt))))
