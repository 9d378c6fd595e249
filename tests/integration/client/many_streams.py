"""A program that reads many streams at the same time: python many_streams.py URL NUMBER."""

import asyncio
import resource
import sys

from llm_api_client import AsyncClient, Result


async def main(url: str, number: int) -> None:
    """Send, read all streams, and compare each text with its result."""
    async with AsyncClient(url, patience=120) as client:
        sent: list[Result] = []
        while len(sent) < number:
            size = min(500, number - len(sent))
            accepted = await client.send_many(
                ["{{chunks=20 delay_ms=200}}"] * size, model="scripted"
            )
            sent += [one for one in accepted if isinstance(one, Result)]
        begun = 0
        all_begun = asyncio.Event()

        async def follow(result: Result) -> bool:
            nonlocal begun
            async with client.stream(result) as stream:
                deltas: list[str] = []
                async for delta in stream:
                    if not deltas:
                        begun += 1
                        if begun == number:
                            all_begun.set()
                        await all_begun.wait()  # every stream is open while the last one begins
                    deltas.append(delta)
            return "".join(deltas) == stream.text == (stream.result and stream.result.text)

        equal = await asyncio.gather(*(follow(result) for result in sent))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(sum(map(bool, equal)), f"{peak} MiB")  # noqa: T201 - read by the test


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
