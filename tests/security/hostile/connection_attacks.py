"""Attacks by connections: readers that never read, writers that never end, storms of cancels."""

import asyncio
import socket
from uuid import uuid4

import orjson

from tests.security.hostile.attacker import MODEL, Attacker
from tests.security.hostile.request_attacks import short

_BUFFER = 4096  # bytes that an unread response fills at its reader
_HELD_SECONDS = 5.0
_SLOW = "slow {{chunks=2000 delay_ms=100}}"


async def _open_unread(attacker: Attacker, method: str, path: str, body: object) -> None:
    """Send a request whose response is never read."""
    content = b"" if body is None else orjson.dumps(body)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {attacker.target.token}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    await _connect(attacker, head.encode() + content)


async def _connect(attacker: Attacker, content: bytes) -> None:
    loop = asyncio.get_running_loop()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    connection.setblocking(False)
    try:
        await loop.sock_connect(connection, ("127.0.0.1", attacker.port))
        await loop.sock_sendall(connection, content)
    except BaseException as error:
        connection.close()
        if not isinstance(error, OSError):
            raise
        attacker.count("broken connection")
        return
    attacker.held.callback(connection.close)
    attacker.count("unread")


async def unread_streams(attacker: Attacker) -> None:
    """As many streams as the service has places for, of one result that runs for minutes."""
    body = short(attacker) | {"content": f"{_SLOW} {uuid4()}", "parameters": {"max_tokens": 2000}}
    result = await attacker.post("/results/", body)
    if not result:
        return
    path = f"/results/{result['id']}/stream"
    for _ in range(attacker.target.streams):
        await _open_unread(attacker, "GET", path, None)
    await asyncio.sleep(_HELD_SECONDS)  # the attack is to hold them
    await attacker.post(f"/results/{result['id']}/cancel", None)


async def unread_responses(attacker: Attacker) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": _SLOW}], "stream": True}
    wanted: list[tuple[str, str, object]] = [
        ("POST", "/v1/chat/completions", chat | {"max_tokens": 500}),
        ("POST", "/generate_stream", {"inputs": _SLOW, "model": MODEL}),
        ("GET", "/results/export", None),
        ("GET", "/results/?limit=1000&full=true&prompts=true", None),
        ("GET", "/contexts/?limit=1000", None),
        ("POST", "/tokenize", {"inputs": "a b " * attacker.size(50_000), "model": MODEL}),
    ]
    for _ in range(20):
        await _open_unread(attacker, *attacker.chance.choice(wanted))
    await asyncio.sleep(_HELD_SECONDS)  # the attack is to hold them


async def half_requests(attacker: Attacker) -> None:
    """Bodies that never end, heads that never end."""
    starts = (
        b"POST /results/ HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 1900000\r\n\r\n" + b"x" * 1_000_000,
        b"POST /results/ HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nfffff\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 500,
        b"\x16\x03\x01" * 1000,
    )
    token = f"\r\nAuthorization: Bearer {attacker.target.token}\r\n".encode()
    for _ in range(20):
        await _connect(attacker, attacker.chance.choice(starts).replace(b"\r\n", token, 1))
    await asyncio.sleep(_HELD_SECONDS)  # the attack is to hold them


async def waits(attacker: Attacker) -> None:
    """Long-polls that hang up."""
    body = short(attacker) | {"content": f"{_SLOW} {uuid4()}"}
    result = await attacker.post("/results/", body)
    if not result:
        return
    path = f"/results/{result['id']}?wait=60"
    for _ in range(200):
        await _open_unread(attacker, "GET", path, None)
    await asyncio.sleep(1)  # the waits are open for a while
    await attacker.post(f"/results/{result['id']}/cancel", None)


async def cancels(attacker: Attacker) -> None:
    """Cancel, retry and delete the same results from many connections at once."""
    bodies = [short(attacker) | {"content": _SLOW} for _ in range(30)]
    accepted = await attacker.post("/results/", bodies)
    ids = [one["id"] for one in accepted or () if "id" in one]
    actions = [("POST", "cancel"), ("POST", "retry"), ("DELETE", ""), ("POST", "cancel")]
    await asyncio.gather(
        *(
            attacker.send(method, f"/results/{one}/{action}".rstrip("/"))
            for one in ids
            for method, action in attacker.chance.sample(actions, 3)
        )
    )
    await attacker.post("/results/cancel?model_name=scripted", None)


async def leaving(attacker: Attacker) -> None:
    """Synchronous requests whose client leaves at once."""
    body = {"model": MODEL, "prompt": _SLOW, "max_tokens": 100, "n": attacker.size(16)}
    for _ in range(20):
        await _open_unread(attacker, "POST", "/v1/completions", body)
    await asyncio.sleep(attacker.chance.random())  # they leave at any moment of the work


CONNECTIONS = (unread_streams, unread_responses, half_requests, waits, cancels, leaving)
