"""The issuer's keys for RS256 and ES256 tokens: a JWKS (RFC 7517), from a file or over https.

Each key has one algorithm, fixed when it is read: its own `alg`, or that of its type. The algorithm
that a token names has no influence. PyJWT's `PyJWKClient` blocks, reads bodies of any size and no
files, drops the keys when the issuer is unreachable, and accepts keys of every algorithm.
"""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import jwt
import orjson

from app.core.errors import InvalidTokenError, SigningKeysUnavailableError

logger = logging.getLogger(__name__)

_PERIOD_SECONDS = 300.0
_MIN_INTERVAL_SECONDS = 10.0  # between two readings, however many tokens name unknown keys
_FETCH_TIMEOUT_SECONDS = 5.0
_MAX_BYTES = 256_000
_MAX_KEYS = 100
# A compressed body could expand beyond every bound.
_HEADERS = {"Accept": "application/json", "Accept-Encoding": "identity"}


class KeySetError(Exception):
    """A JWKS cannot be read, or has no usable key; the message is the reason."""


class SigningKeys:
    """The issuer's keys as of the last successful reading; `run` reads them every five minutes.

    An unknown key id causes a reading at once, so that a rotation needs no restart.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._keys: dict[str | None, jwt.PyJWK] | None = None
        self._reading = asyncio.Lock()
        self._read_at = float("-inf")

    async def run(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(_PERIOD_SECONDS)

    async def find(self, kid: str | None) -> jwt.PyJWK:
        """The key with this id; if `kid` is None, the only key of the set.

        Raises InvalidTokenError for an unknown key, SigningKeysUnavailableError before the first
        successful reading.
        """
        key = self._select(kid)
        if key is None:
            await self.refresh()
            key = self._select(kid)
        if self._keys is None:
            raise SigningKeysUnavailableError(
                "The issuer's keys (LLM_JWKS) could not be read yet. Try again.",
                headers={"Retry-After": "10"},
            )
        if key is None:
            raise InvalidTokenError("the issuer has no such signing key (kid)")
        return key

    def _select(self, kid: str | None) -> jwt.PyJWK | None:
        keys = self._keys or {}
        if kid is None and len(keys) == 1:
            return next(iter(keys.values()))
        return keys.get(kid)

    async def refresh(self) -> None:
        """Read the keys, at most once per interval; after a failure the previous keys stay."""
        async with self._reading:
            now = asyncio.get_running_loop().time()
            if now - self._read_at < _MIN_INTERVAL_SECONDS:
                return
            self._read_at = now
            try:
                self._keys = parse_key_set(await _read(self._source))
            except KeySetError as error:
                logger.warning(
                    "LLM_JWKS was not read: %s", error, extra={"action": "signing_keys_lost"}
                )


def is_url(source: str) -> bool:
    return "://" in source


def read_file(source: str) -> bytes:
    try:
        with Path(source).open("rb") as file:
            return file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise KeySetError(f"{source}: {error.strerror}") from error


def parse_key_set(text: bytes) -> dict[str | None, jwt.PyJWK]:
    """The usable keys by id. Raises KeySetError if there is none."""
    if len(text) > _MAX_BYTES:
        raise KeySetError(f"it has more than {_MAX_BYTES} bytes")
    try:
        document = orjson.loads(text)
    except ValueError as error:
        raise KeySetError("it is not JSON") from error
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise KeySetError("it has no list `keys`")
    found: dict[str | None, jwt.PyJWK] = {}
    for entry in listed[:_MAX_KEYS]:
        try:
            found[_kid_of(entry)] = _to_key(entry)
        except KeySetError as error:
            logger.info("a key of LLM_JWKS is left out: %s", error)
    if not found:
        raise KeySetError("it has no RS256 or ES256 key for signatures")
    return found


def _kid_of(entry: Any) -> str | None:
    kid = entry.get("kid") if isinstance(entry, dict) else None
    if kid is not None and not isinstance(kid, str):
        raise KeySetError("its kid is not a string")
    return kid


def _to_key(entry: Any) -> jwt.PyJWK:
    if not isinstance(entry, dict):
        raise KeySetError("it is not an object")
    if "d" in entry:
        raise KeySetError("it is a private key, which a key set must not hold")
    if entry.get("use", "sig") != "sig":
        raise KeySetError("it is not for signatures")
    algorithm = _algorithm_of(entry)
    try:
        key = jwt.PyJWK(entry, algorithm)
    except jwt.PyJWTError as error:
        raise KeySetError(f"it is not a valid {algorithm} key") from error
    if algorithm == "RS256" and key.key.key_size < 2048:
        raise KeySetError("it has fewer than 2048 bits")
    return key


def _algorithm_of(entry: Mapping[str, Any]) -> str:
    algorithm = ""
    if entry.get("kty") == "RSA":
        algorithm = "RS256"
    elif entry.get("kty") == "EC" and entry.get("crv") == "P-256":
        algorithm = "ES256"
    if not algorithm or entry.get("alg", algorithm) != algorithm:
        raise KeySetError("neither RS256 nor ES256 is its algorithm")
    return algorithm


async def _read(source: str) -> bytes:
    if not is_url(source):
        return await asyncio.to_thread(read_file, source)
    try:
        async with asyncio.timeout(_FETCH_TIMEOUT_SECONDS):
            return await _fetch(source)
    except TimeoutError as error:
        raise KeySetError(
            f"{source} did not answer within {_FETCH_TIMEOUT_SECONDS:.0f} s"
        ) from error
    except httpx.HTTPError as error:
        raise KeySetError(f"{source}: {error}") from error


async def _fetch(url: str) -> bytes:
    """Fetch a key set; redirects are refused, since they could lead to a host outside the configuration."""
    body = bytearray()
    context = await asyncio.to_thread(httpx.create_ssl_context)  # reads hundreds of certificates
    async with (
        httpx.AsyncClient(verify=context, headers=_HEADERS) as client,
        client.stream("GET", url) as answer,
    ):
        if answer.status_code != httpx.codes.OK:
            raise KeySetError(f"{url} answered {answer.status_code}")
        async for part in answer.aiter_raw():
            body += part
            if len(body) > _MAX_BYTES:
                break
    return bytes(body)
