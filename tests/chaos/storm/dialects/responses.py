"""Responses of the dialects: texts, streams of events, and refusals."""

from collections.abc import Callable

from tests.chaos.storm.client import AGAIN, Client
from tests.chaos.storm.raw_http import Reply, ask


async def read_events(client: Client, path: str, body: object, take: Callable[[str], None]) -> None:
    """Read a stream once; who has no key must not ask again."""
    client.order.texts = [""]
    rest = b""
    try:
        async with ask(client.port, "POST", path, body, client.headers) as reply:
            client.count(str(reply.status))
            client.learn_ids(reply)
            if reply.status != 200:
                refused(client, reply, await reply.read())
                return
            async for block in reply.blocks():
                *frames, rest = (rest + block).split(b"\n\n")
                for line in b"\n".join(frames).decode().split("\n"):
                    if line.startswith("data:"):
                        take(line.removeprefix("data:").strip())
    except OSError:
        client.count("broken connection")
        client.order.is_broken = True


def refused(client: Client, reply: Reply, content: bytes) -> None:
    """No answer was received; the failure is the result's own or transient."""
    assert reply.status in (*AGAIN, 500, 424), (reply.status, content)
    client.order.refusal = f"{reply.status} {content.decode()}"
    client.order.texts = []


def take_texts(client: Client, texts: list[str]) -> None:
    client.order.texts, client.order.is_whole = texts, True
