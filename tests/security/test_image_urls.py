"""Attacks by URLs of images, on real servers of this machine: the addresses, bytes and time of a fetch."""

import asyncio
import gzip
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from app.core.errors import InvalidRequestError
from app.core.settings import Settings
from app.core.url_guard import Lookup
from app.inference.images import uris_of
from app.results.image_urls import ImageUrls
from tests.conftest import make_settings
from tests.images import BLUE, RED, png, png_uri
from tests.integration.support import until
from tests.integration.webhook_receiver import Call, Respond, answer, receiving, silence
from tests.postgres import PostgresServer

MOST = 100_000  # characters of the images of a request
TYPE = "Content-Type: image/png"
RED_PNG = answer(200, TYPE, body=png(RED))


class Guarded:
    """Settings of services that fetch images; a fetch needs no database."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server

    def settings(self, mode: str = "any", **changes: object) -> Settings:
        values: dict[str, Any] = {"max_body_bytes": MOST, "image_url_timeout_seconds": 20}
        return make_settings(self._server, "unused", image_urls=mode, **values | changes)


@pytest.fixture
def guarded(postgres_server: PostgresServer) -> Guarded:
    return Guarded(postgres_server)


def named(*addresses: str) -> Lookup:
    """A nameserver with the same answer for each name."""
    return lambda _host, port, **_: [(0, 0, 0, "", (address, port)) for address in addresses]


def messages(*urls: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "", "images": [{"url": one, "after": 0} for one in urls]}]


async def fetch(images: ImageUrls, *urls: str, team: str = "team") -> list[str]:
    return uris_of(await images.fetched(team, messages(*urls)))


async def refused(images: ImageUrls, *urls: str) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        await fetch(images, *urls)
    (error,) = caught.value.errors
    assert error.field == "messages"
    return error.message


async def refused_with(settings: Settings, respond: Respond) -> str:
    async with receiving() as server, ImageUrls(settings) as images:
        server.respond = respond
        return await refused(images, server.url)


@pytest.mark.parametrize(
    "addresses",
    [
        ("127.0.0.1",),
        ("10.0.0.1",),
        ("169.254.169.254",),
        ("::1",),
        ("::ffff:127.0.0.1",),
        ("8.8.8.8", "127.0.0.1"),
    ],
)
async def test_a_name_of_a_private_address_is_refused(
    guarded: Guarded, addresses: tuple[str, ...]
) -> None:
    async with (
        receiving() as inner,
        ImageUrls(guarded.settings("public"), named(*addresses)) as images,
    ):
        words = await refused(images, f"http://images.example:{inner.port}/a.png")
    assert f"images.example is {addresses[-1]}, not a public address" in words
    assert "LLM_IMAGE_URLS=any permits it" in words
    assert inner.calls == []


async def test_private_addresses_are_refused_in_each_spelling(guarded: Guarded) -> None:
    async with receiving() as inner, ImageUrls(guarded.settings("public")) as images:
        for host in ("127.0.0.1", "127.1", "0x7f.1", "localhost", "a.localhost", "[::1]"):
            words = await refused(images, f"http://{host}:{inner.port}/a.png")
            assert "LLM_IMAGE_URLS=any permits it" in words, host
        for url in ("http://secret@example.org/", "http://example.org:0/", "http://a%2eb/"):
            assert "secret" not in await refused(images, url)
    assert inner.calls == []


async def test_a_name_is_resolved_once(guarded: Guarded) -> None:
    """The connection is to the checked address, and a name with another address later has no effect."""
    lookups = iter((named("127.0.0.1"), named("10.9.9.9")))
    async with (
        receiving() as server,
        ImageUrls(guarded.settings(), lambda *args, **kw: next(lookups)(*args, **kw)) as images,
    ):
        server.respond = RED_PNG
        found = await fetch(images, f"http://images.example:{server.port}/a.png?b=c")
        assert found == [png_uri(RED)]
    (call,) = server.calls
    assert call.line == "GET /a.png?b=c HTTP/1.1"
    assert call.headers["host"] == f"images.example:{server.port}"
    assert "cookie" not in call.headers


async def test_redirects_are_not_followed(guarded: Guarded) -> None:
    async with (
        receiving() as inner,
        receiving() as server,
        ImageUrls(guarded.settings()) as images,
    ):
        inner.respond = RED_PNG
        for status in (301, 302, 303, 307, 308):
            server.respond = answer(status, f"Location: {inner.url}")
            words = await refused(images, server.url)
            assert f"answered {status}: redirects are not followed" in words
    assert inner.calls == []


async def _drip(_: Call, writer: asyncio.StreamWriter) -> None:
    writer.write(f"HTTP/1.1 200 X\r\n{TYPE}\r\nContent-Length: 90000\r\n\r\n".encode())
    while True:  # each piece is in time
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def _drip_headers(_: Call, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 X\r\n")
    while True:
        writer.write(b"A: b\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("respond", [silence, _drip, _drip_headers])
async def test_slow_servers_are_left_in_time(guarded: Guarded, respond: Respond) -> None:
    settings = guarded.settings(image_url_timeout_seconds=1.0)
    async with receiving() as fast, receiving() as slow, ImageUrls(settings) as images:
        fast.respond, slow.respond = RED_PNG, respond
        began = time.monotonic()
        words = await refused(images, fast.url, slow.url)
        assert 0.9 < time.monotonic() - began < 15
    assert "was not read within 1 s (LLM_IMAGE_URL_TIMEOUT_SECONDS)" in words


async def test_a_body_without_end_is_left_at_the_bound(guarded: Guarded) -> None:
    sent = 0

    async def pour(_: Call, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(f"HTTP/1.1 200 X\r\n{TYPE}\r\n\r\n".encode() + png(RED))
        while True:
            writer.write(bytes(50_000))
            await writer.drain()
            sent += 50_000

    words = await refused_with(guarded.settings(), pour)
    assert f"have at most {MOST} bytes as data URIs (LLM_MAX_BODY_BYTES)" in words
    assert sent < 20_000_000  # what sockets hold


async def test_images_of_a_request_have_one_bound(guarded: Guarded) -> None:
    half = png(RED) + bytes(30_000)  # 40,000 characters each
    async with receiving() as server, ImageUrls(guarded.settings()) as images:
        server.respond = answer(200, TYPE, body=half)
        assert len(await fetch(images, server.url, server.url)) == 2
        assert len(server.calls) == 1
        others = [f"{server.url}?{n}" for n in range(3)]
        assert "have at most" in await refused(images, *others)
        assert "have at most" in await refused(images, *[server.url] * 3)
        uris = ["data:image/png;base64," + "A" * 40_000] * 2
        assert "have at most" in await refused(images, *uris, server.url)
        seen = len(server.calls)
        assert "have 9 images; a request may have 8" in await refused(images, *[server.url] * 9)
        assert "have at most" in await refused(images, *uris, uris[0], server.url)
        assert len(server.calls) == seen


@pytest.mark.parametrize(
    ("respond", "words"),
    [
        (answer(200, "Content-Type: text/html", body=b"<p>"), "the content type 'text/html', not one"),
        (answer(200, "Content-Type: image/svg+xml", body=b"<svg>"), "'image/svg+xml', not one of"),
        (answer(200, body=png(RED)), "the content type '', not one of"),
        (answer(200, TYPE, body=b"GIF89a"), "the content is not of type image/png"),
        (answer(200, TYPE, body=b""), "the content is not of type image/png"),
        (answer(200, TYPE, "Content-Encoding: gzip", body=gzip.compress(png(RED))), "encoding 'gzip'"),
        (answer(206, TYPE, body=png(RED)), "answered 206"),
        (answer(404, TYPE, body=png(RED)), "answered 404"),
        (answer(503, TYPE, body=png(RED)), "answered 503"),
        (answer(200, TYPE, "Content-Length: 9", body=png(RED)), "RemoteProtocolError"),
        (answer(200, *[f"X-{n}: {'y' * 9_000}" for n in range(20)]), "RemoteProtocolError"),
    ],
)  # fmt: skip
async def test_other_responses_are_refused(guarded: Guarded, respond: Respond, words: str) -> None:
    assert words in await refused_with(guarded.settings(), respond)


async def test_parameters_of_a_content_type_have_no_effect(guarded: Guarded) -> None:
    async with receiving() as server, ImageUrls(guarded.settings()) as images:
        server.respond = answer(200, "Content-Type: Image/PNG; charset=x", body=png(BLUE))
        assert await fetch(images, server.url, png_uri(RED)) == [png_uri(BLUE), png_uri(RED)]


async def test_a_certificate_is_that_of_the_name(
    guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=images.example", "-addext",
         "subjectAltName=DNS:images.example", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    async with receiving(tls=tls) as server:
        server.respond = RED_PNG
        url = f"https://images.example:{server.port}/a.png"
        async with ImageUrls(guarded.settings(), named("127.0.0.1")) as images:
            assert "CERTIFICATE_VERIFY_FAILED" in await refused(images, url)  # no known authority
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
        async with ImageUrls(guarded.settings(), named("127.0.0.1")) as images:
            other = url.replace("images.example", "other.example")
            assert "CERTIFICATE_VERIFY_FAILED" in await refused(images, other)
            assert server.calls == []
            assert await fetch(images, url) == [png_uri(RED)]


async def test_a_team_with_slow_servers_leaves_places_to_others(guarded: Guarded) -> None:
    settings = guarded.settings(image_url_timeout_seconds=60)
    async with receiving() as slow, receiving() as fast, ImageUrls(settings) as images:
        slow.respond, fast.respond = silence, RED_PNG
        hanging = [
            asyncio.create_task(fetch(images, f"{slow.url}?{n}", team="hostile")) for n in range(40)
        ]
        await until(lambda: asyncio.sleep(0, len(slow.calls) >= 8))
        assert await fetch(images, fast.url, team="other") == [png_uri(RED)]
        assert len(slow.calls) == slow.most_at_once == 8
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)


async def test_nothing_is_fetched_by_default(postgres_server: PostgresServer) -> None:
    settings = make_settings(postgres_server, "unused")
    async with receiving() as server, ImageUrls(settings) as images:
        assert "LLM_IMAGE_URLS=off" in await refused(images, server.url)
        assert await fetch(images, png_uri(RED)) == [png_uri(RED)]
    assert server.calls == []


async def test_dead_servers_and_unknown_names_are_refused(guarded: Guarded) -> None:
    async with receiving() as server:
        url = server.url
    async with ImageUrls(guarded.settings()) as images:
        assert "the image of 127.0.0.1: ConnectError" in await refused(images, url)
        words = await refused(images, "http://no-such-name.invalid/a.png")
        assert "the name cannot be resolved" in words
