"""One caller in a process of its own: `python -m bench.poller PORT PATH SECONDS`.

Beside callers of the same load generator it would wait for them, too: they read and write on its
loop. It prints its latencies in seconds as a list of JSON.
"""

import asyncio
import sys

import orjson
import uvloop

from bench.load import Load, connect, get


async def poll(port: int, path: str, seconds: float) -> Load:
    """GET a path again and again for so many seconds, each time once the last one is answered."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.poller", str(port), path, str(seconds),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"GET {path} failed; see above")
    latencies: list[float] = orjson.loads(output)
    return Load(len(latencies), len(latencies) / seconds, latencies)


async def _main(port: int, path: str, seconds: float) -> None:
    async with connect(port, 1) as one:
        load = await one.run(lambda: get(path), seconds, (200,))
    sys.stdout.buffer.write(orjson.dumps(load.latencies))


if __name__ == "__main__":
    uvloop.run(_main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
