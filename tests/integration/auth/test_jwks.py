"""An issuer's keys over https: a real TLS server, whose certificate is checked."""

import asyncio
import contextlib
import json
import ssl
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import jwt
import pytest

from app.auth.jwks import _MAX_BYTES, SigningKeys
from app.auth.jwt_verifier import JwtVerifier
from app.core.errors import SigningKeysUnavailableError
from app.core.settings import Settings
from tests.conftest import run_service
from tests.integration.auth.test_auth import bearer
from tests.integration.support import until
from tests.unit.auth.test_jwt import EC_KEY, ISSUED, PLACE, make_settings, to_jwk

KEYS = json.dumps({"keys": [to_jwk(EC_KEY, kid="e")]}).encode()
TOKEN = jwt.encode(ISSUED, EC_KEY, "ES256", headers={"kid": "e"})


@dataclass
class Issuer:
    """Answers every request alike; `requests` are their first lines."""

    port: int = 0
    status: str = "200 OK"
    body: bytes = KEYS
    headers: str = ""
    is_silent: bool = False
    is_endless: bool = False  # the body has no end
    requests: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}/keys"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head.decode().split("\r\n")[0])
            if self.is_silent:
                await reader.read()  # until the client leaves
            start = (
                f"HTTP/1.1 {self.status}\r\nContent-Length: {len(self.body)}\r\n{self.headers}\r\n"
            )
            writer.write(start.encode() + self.body)
            await writer.drain()
            if self.is_endless:
                await reader.read()  # until the client leaves
        writer.close()


@pytest.fixture
async def issuer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Issuer]:
    """An issuer that this process trusts."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setattr("app.auth.jwks._MIN_INTERVAL_SECONDS", 0.0)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    found = Issuer()
    server = await asyncio.start_server(found.serve, "localhost", 0, ssl=tls)
    found.port = server.sockets[0].getsockname()[1]
    yield found
    # Also for handshakes that a test cut short: Python 3.11 waits only where it did so before.
    closed = asyncio.create_task(server.wait_closed())
    await asyncio.sleep(0)
    server.close()
    await closed


def verifier(url: str) -> JwtVerifier:
    return JwtVerifier(make_settings(LLM_JWKS=url, **PLACE))


async def test_keys_are_fetched_once_for_many_tokens(issuer: Issuer) -> None:
    by = verifier(issuer.url)
    for _ in range(3):
        assert (await by.verify(TOKEN)).principal.team_id == "tenstorrent"
    assert issuer.requests == ["GET /keys HTTP/1.1"]


async def test_a_service_takes_the_issuers_tokens(issuer: Issuer, settings: Settings) -> None:
    changes = {"jwks": issuer.url, "jwt_issuer": PLACE["LLM_JWT_ISSUER"], "jwt_audience": "llm"}
    async with run_service(settings.model_copy(update=changes), with_worker=False) as service:

        async def is_read() -> bool:
            return bool(issuer.requests)

        await until(is_read)  # before the first token
        answer = await service.client.get("/results/", headers=bearer(TOKEN))
        assert answer.status_code == 200
        await service.services.tokens.revoke_token("tenstorrent", "debug-test")
        service.services.authenticator.clear_cache()
        answer = await service.client.get("/results/", headers=bearer(TOKEN))
        assert answer.status_code == 401


@pytest.mark.parametrize(
    "wrong",
    [
        {"status": "302 Found", "headers": "Location: https://localhost/elsewhere\r\n"},
        {"status": "500 Oops"}, {"status": "404 Not Found"}, {"status": "204 No Content", "body": b""},
        {"body": b""}, {"body": b"{}"}, {"body": b"x" * 1_000_000}, {"body": b'{"keys": []}'},
        pytest.param({"is_silent": True}, marks=pytest.mark.trial, id="silent"),
    ],
)  # fmt: skip
async def test_answers_that_are_no_keys(
    issuer: Issuer, wrong: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def give(answer: dict[str, object]) -> None:
        for name, value in answer.items():
            setattr(issuer, name, value)
        seconds = 2.0 if issuer.is_silent else 30.0
        monkeypatch.setattr("app.auth.jwks._FETCH_TIMEOUT_SECONDS", seconds)

    give(wrong)
    by = verifier(issuer.url)
    with pytest.raises(SigningKeysUnavailableError):
        await by.verify(TOKEN)
    assert len(issuer.requests) == 1  # no redirect was followed, nothing was repeated
    # When the issuer is back, so are its tokens; and when it goes wrong again they stay.
    good = Issuer(port=issuer.port)
    give({name: getattr(good, name) for name in wrong})
    await by.verify(TOKEN)
    give(wrong)
    assert by.keys is not None
    await by.keys.refresh()
    await by.verify(TOKEN)


async def test_a_body_is_read_up_to_its_bound(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("app.auth.jwks._FETCH_TIMEOUT_SECONDS", 30.0)
    issuer.headers, issuer.is_endless = "Transfer-Encoding: chunked\r\n", True
    # One chunk is as large as a key set may be. It has valid keys, but is not the end.
    chunks = KEYS.ljust(_MAX_BYTES), b" "
    issuer.body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    with pytest.raises(SigningKeysUnavailableError):
        await verifier(issuer.url).verify(TOKEN)
    assert f"more than {_MAX_BYTES} bytes" in caplog.text


async def test_an_untrusted_certificate(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(SigningKeysUnavailableError):
        await verifier(issuer.url).verify(TOKEN)
    assert issuer.requests == []
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text


async def test_the_keys_are_read_from_time_to_time(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    period = 0.3  # it is not cut in a handshake
    monkeypatch.setattr("app.auth.jwks._PERIOD_SECONDS", period)
    began = asyncio.get_running_loop().time()
    running = asyncio.create_task(SigningKeys(issuer.url).run())

    async def is_read_again() -> bool:
        return len(issuer.requests) >= 3

    await until(is_read_again, 30)
    passed = asyncio.get_running_loop().time() - began
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert passed >= 2 * period
