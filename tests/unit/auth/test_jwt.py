"""JWTs: what is taken, and everything that is not."""

import asyncio
import base64
import hashlib
import hmac
import json
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from app.auth import jwt_verifier
from app.auth.jwks import _MAX_BYTES, KeySetError, parse_key_set, read_file
from app.auth.jwt_verifier import LEEWAY_SECONDS, JwtVerifier
from app.core.errors import InvalidTokenError, ServiceError, SigningKeysUnavailableError
from app.core.settings import Settings
from tests.unit.api.test_startup_checks import STRONG
from tests.unit.core.test_settings import REQUIRED

OURS: dict[str, Any] = {"team_id": "tenstorrent", "token_id": "debug-test"}
PLACE = {"LLM_JWT_ISSUER": "https://issuer.example", "LLM_JWT_AUDIENCE": "llm"}
OTHER_SECRET = STRONG[::-1]
FAR = 10**12

RSA_KEY = rsa.generate_private_key(65537, 2048)
WEAK_RSA_KEY = rsa.generate_private_key(65537, 1024)  # noqa: S505 - to be refused
EC_KEY = ec.generate_private_key(ec.SECP256R1())
P384_KEY = ec.generate_private_key(ec.SECP384R1())
PRIVATE_JWKS = [
    json.loads(jwt.get_algorithm_by_name(name).to_jwk(key))
    for name, key in (("RS256", RSA_KEY), ("ES256", EC_KEY))
]


def make_settings(**changes: str) -> Settings:
    return Settings.model_validate(REQUIRED | changes)


def verifier(**changes: str) -> JwtVerifier:
    return JwtVerifier(make_settings(JWT_SECRET=STRONG, **changes))


def sign(claims: dict[str, Any], secret: str = STRONG, **header: Any) -> str:
    return jwt.encode(claims, secret, algorithm="HS256", headers=header)


def raw(header: object, claims: object, secret: str = STRONG, digest: str = "sha256") -> str:
    """A token with any header, always signed by HMAC."""
    parts = [part if isinstance(part, bytes) else json.dumps(part).encode() for part in (header, claims)]  # fmt: skip
    text = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)
    signature = hmac.new(secret.encode(), text, getattr(hashlib, digest)).digest()
    return (text + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")).decode()


def to_jwk(key: Any, **members: object) -> dict[str, Any]:
    algorithm = jwt.get_algorithm_by_name(
        "RS256" if isinstance(key, rsa.RSAPrivateKey) else "ES256"
    )
    jwk: dict[str, Any] = json.loads(algorithm.to_jwk(key.public_key()))
    return jwk | members


def write_keys(tmp_path: Path, *keys: dict[str, Any]) -> str:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": keys}))
    return str(file)


async def refused(by: JwtVerifier, token: str) -> str:
    with pytest.raises(InvalidTokenError) as raised:
        await by.verify(token)
    reason = raised.value.detail
    assert STRONG not in reason
    assert token not in reason or len(token) < 8
    assert raised.value.status == 401
    return reason


async def test_the_tenstorrent_clients_token_has_no_end() -> None:
    found = await verifier().verify(sign(OURS))
    assert found.principal.team_id == "tenstorrent"
    assert found.principal.token_id == "debug-test"
    assert found.principal.scopes == {"use"}
    assert found.principal.max_priority == 0
    assert found.seconds_left is None


async def test_claims_become_a_principal() -> None:
    more = {
        "scopes": ["use", "operate", "fly"],
        "max_priority": 7,
        "exp": time.time() + 100,
        "x": 1,
    }
    found = await verifier().verify(sign(OURS | more))
    assert found.principal.scopes == {"use", "operate"}
    assert found.principal.max_priority == 7
    assert found.seconds_left is not None
    assert 0 < found.seconds_left <= 100 + LEEWAY_SECONDS
    assert (await verifier().verify(sign(OURS | {"scopes": []}))).principal.scopes == set()


@pytest.mark.parametrize(
    "claims",
    [
        {"exp": 1}, {"exp": time.time() - 3600}, {"nbf": FAR}, {"iat": FAR}, {"exp": "soon"},
        {"exp": None}, {"exp": []}, {"exp": float("inf")}, {"exp": float("nan")}, {"nbf": {}},
        {"iat": "x"}, {"iss": "somebody"}, {"aud": "somebody"}, {"aud": ["a", "b"]}, {"aud": 3},
        {"team_id": None}, {"team_id": ""}, {"team_id": 7}, {"team_id": "x" * 65},
        {"team_id": "a\x00"}, {"team_id": "a\nb"}, {"team_id": "\ud800"}, {"team_id": ["a"]},
        {"token_id": None}, {"token_id": ""}, {"token_id": "x" * 129}, {"token_id": 1},
        {"token_id": "\x00"}, {"scopes": "use"}, {"scopes": [1]}, {"scopes": None}, {"scopes": {}},
        {"max_priority": -1}, {"max_priority": 101}, {"max_priority": "1"}, {"max_priority": 1.5},
        {"max_priority": True}, {"max_priority": 10**400},
    ],
)  # fmt: skip
async def test_bad_claims(claims: dict[str, Any]) -> None:
    assert await refused(verifier(), raw({"alg": "HS256"}, OURS | claims))


@pytest.mark.parametrize("name", ["exp", "nbf", "iat"])
@pytest.mark.parametrize(
    "value",
    [
        "1" + "0" * 400, "-1" + "0" * 400, "1" + "0" * 5000, "9007199254740993", "NaN", "Infinity",
        "-Infinity", "1e400", "1e300", "-1e300", "-1", "-0.5", "true", "false", "null",
        '"2000000000"', "[]", "{}",
    ],
)  # fmt: skip
async def test_a_time_that_is_none(name: str, value: str) -> None:
    """As written: Python's JSON reads more numbers than there are."""
    claims = json.dumps(OURS)[:-1] + f', "{name}": {value}}}'
    assert await refused(verifier(), raw({"alg": "HS256"}, claims.encode()))


@pytest.mark.parametrize("name", OURS)
async def test_missing_claims(name: str) -> None:
    assert name in await refused(
        verifier(), sign({key: value for key, value in OURS.items() if key != name})
    )


@pytest.mark.parametrize("name", ["nbf", "iat"])
async def test_clocks_may_differ_a_little(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jwt_verifier, "LEEWAY_SECONDS", 60.0)  # this machine may stall
    by = verifier()
    for claims in ({name: int(time.time() + 30)}, {"exp": int(time.time() - 30)}):
        assert (await by.verify(sign(OURS | claims))).principal.team_id == OURS["team_id"]


@pytest.mark.parametrize(
    "header",
    [
        {"alg": "none"}, {"alg": "None"}, {"alg": ""}, {"alg": None}, {}, {"alg": "hs256"},
        {"alg": "HS384"}, {"alg": "HS512"}, {"alg": "RS256"}, {"alg": "ES256"}, {"alg": ["HS256"]},
        {"alg": {"HS256": 1}}, {"alg": "HS256", "crit": ["exp"]}, {"alg": "HS256", "kid": 1},
        {"alg": "HS256", "b64": False}, [], "x", 1, None, b"\xff", b"{",
        b'{"alg": "HS256", "alg": "none"}', b"[" * 5000,
    ],
)  # fmt: skip
async def test_bad_headers_of_tokens(header: object) -> None:
    for by in (verifier(), JwtVerifier(make_settings(LLM_AUTH="on"))):
        assert await refused(by, raw(header, OURS))


@pytest.mark.parametrize(
    "payload", [[], "x", 1, None, b"", b"\xff", b"{", b"[" * 5000, b"1" * 5000]
)
async def test_bad_payloads(payload: object) -> None:
    assert await refused(verifier(), raw({"alg": "HS256"}, payload))


async def test_alg_none_without_a_signature() -> None:
    unsigned = jwt.encode(OURS, "", algorithm="none")
    assert unsigned.endswith(".")
    assert await refused(verifier(), unsigned)
    assert await refused(verifier(), sign(OURS).rsplit(".", 1)[0] + ".")


async def test_another_secret_and_another_digest() -> None:
    assert await refused(verifier(), sign(OURS, OTHER_SECRET)) == "Signature verification failed"
    assert await refused(verifier(), raw({"alg": "HS256"}, OURS, digest="sha512"))
    assert await refused(verifier(), raw({"alg": "HS256"}, OURS, secret=""))


async def test_every_truncation_and_every_flipped_character() -> None:
    token = sign(OURS)
    by = verifier()
    for end in range(len(token)):
        assert await refused(by, token[:end])
    for place in range(len(token)):
        flipped = "A" if token[place] != "A" else "B"
        assert await refused(by, token[:place] + flipped + token[place + 1 :])


@pytest.mark.parametrize(
    "token", ["", ".", "..", "...", "a.b", "a.b.c.d", "x" * 8000, "=.=.=", " . . "]
)
async def test_what_is_no_token(token: str) -> None:
    assert await refused(verifier(), token)


async def test_without_a_secret_no_hs256() -> None:
    assert await refused(JwtVerifier(make_settings(LLM_AUTH="on")), sign(OURS))


async def test_place_is_checked_where_an_hs256_token_names_it() -> None:
    by = JwtVerifier(make_settings(JWT_SECRET=STRONG, **PLACE))
    await by.verify(sign(OURS | {"iss": PLACE["LLM_JWT_ISSUER"], "aud": ["x", "llm"]}))
    await by.verify(sign(OURS))
    assert await refused(by, sign(OURS | {"iss": "x"}))
    assert await refused(by, sign(OURS | {"aud": "x"}))


# --- RS256 and ES256 --------------------------------------------------------------------------------

ISSUED = OURS | {"iss": "https://issuer.example", "aud": "llm", "exp": 2 * 10**9}


@pytest.fixture
def issuer(tmp_path: Path) -> JwtVerifier:
    keys = write_keys(tmp_path, to_jwk(RSA_KEY, kid="r"), to_jwk(EC_KEY, kid="e", alg="ES256"))
    return verifier(LLM_JWKS=keys, **PLACE)


@pytest.mark.parametrize(
    ("key", "algorithm", "kid"), [(RSA_KEY, "RS256", "r"), (EC_KEY, "ES256", "e")]
)
async def test_issued_tokens(issuer: JwtVerifier, key: Any, algorithm: str, kid: str) -> None:
    token = jwt.encode(ISSUED, key, algorithm=algorithm, headers={"kid": kid})
    found = await issuer.verify(token)
    assert found.principal.team_id == "tenstorrent"
    assert found.seconds_left is not None
    # The secret's tokens are taken beside them.
    await issuer.verify(sign(OURS))
    changes: list[dict[str, Any]] = [
        {"iss": None}, {"iss": "x"}, {"aud": None}, {"aud": "x"}, {"aud": []}, {"exp": 1},
        {"nbf": FAR}, {"iat": FAR}, {"exp": None}, {"team_id": ""},
    ]  # fmt: skip
    for change in changes:
        claims = {k: v for k, v in (ISSUED | change).items() if v is not None}
        assert await refused(issuer, jwt.encode(claims, key, algorithm, headers={"kid": kid}))


async def test_a_key_has_one_algorithm(issuer: JwtVerifier) -> None:
    for algorithm in ("RS384", "RS512", "PS256"):
        assert await refused(issuer, jwt.encode(ISSUED, RSA_KEY, algorithm, headers={"kid": "r"}))
    # The right algorithm for the wrong key, and a key of another issuer.
    assert await refused(issuer, jwt.encode(ISSUED, RSA_KEY, "RS256", headers={"kid": "e"}))
    other = rsa.generate_private_key(65537, 2048)
    assert await refused(issuer, jwt.encode(ISSUED, other, "RS256", headers={"kid": "r"}))
    for header in ({}, {"kid": "x"}, {"kid": ""}):
        assert await refused(issuer, jwt.encode(ISSUED, RSA_KEY, "RS256", headers=header))


async def test_a_public_key_is_no_secret(issuer: JwtVerifier) -> None:
    """The classic confusion: HS256 with the issuer's public key as the secret."""
    pem = RSA_KEY.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    for text in (pem.decode(), pem.decode().strip(), json.dumps(to_jwk(RSA_KEY, kid="r"))):
        for kid in ({}, {"kid": "r"}):
            assert await refused(issuer, raw({"alg": "HS256"} | kid, ISSUED, secret=text))
            assert await refused(issuer, raw({"alg": "RS256"} | kid, ISSUED, secret=text))


@pytest.mark.parametrize("members", [{}, {"kid": "e"}], ids=["key_without_id", "key_with_id"])
async def test_the_only_key_needs_no_id(tmp_path: Path, members: dict[str, str]) -> None:
    by = verifier(LLM_JWKS=write_keys(tmp_path, to_jwk(EC_KEY, **members)), **PLACE)
    await by.verify(jwt.encode(ISSUED, EC_KEY, "ES256"))


async def test_a_rotated_key_is_found_by_reading_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by = verifier(LLM_JWKS=write_keys(tmp_path, to_jwk(RSA_KEY, kid="r")), **PLACE)
    new = jwt.encode(ISSUED, EC_KEY, "ES256", headers={"kid": "e"})
    assert await refused(by, new)
    write_keys(tmp_path, to_jwk(EC_KEY, kid="e"))
    assert await refused(by, new)  # not again so soon: every client can name unknown keys
    monkeypatch.setattr("app.auth.jwks._MIN_INTERVAL_SECONDS", 0.0)
    await asyncio.gather(*(by.verify(new) for _ in range(5)))
    assert await refused(by, jwt.encode(ISSUED, RSA_KEY, "RS256", headers={"kid": "r"}))


async def test_keys_that_were_read_stay_while_they_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.auth.jwks._MIN_INTERVAL_SECONDS", 0.0)
    file = Path(write_keys(tmp_path, to_jwk(EC_KEY, kid="e")))
    by = verifier(LLM_JWKS=str(file), **PLACE)
    token = jwt.encode(ISSUED, EC_KEY, "ES256", headers={"kid": "e"})
    await by.verify(token)
    file.unlink()
    assert by.keys is not None
    await by.keys.refresh()
    await by.verify(token)


async def test_before_they_were_read_nothing_is_judged(tmp_path: Path) -> None:
    by = verifier(LLM_JWKS=str(tmp_path / "none.json"), **PLACE)
    with pytest.raises(SigningKeysUnavailableError) as raised:
        await by.verify(jwt.encode(ISSUED, EC_KEY, "ES256", headers={"kid": "e"}))
    assert isinstance(raised.value, ServiceError)
    assert raised.value.headers["Retry-After"]


@pytest.mark.parametrize(
    "entry",
    [
        {"kty": "oct", "k": "c2VjcmV0", "alg": "HS256"}, to_jwk(RSA_KEY, use="enc"),
        to_jwk(RSA_KEY, alg="HS256"), to_jwk(RSA_KEY, alg="none"), to_jwk(RSA_KEY, alg="RS512"),
        to_jwk(EC_KEY, alg="RS256"), to_jwk(EC_KEY, crv="P-384"), to_jwk(RSA_KEY, kid=7),
        to_jwk(P384_KEY), *PRIVATE_JWKS,
        to_jwk(RSA_KEY, d="AQAB"), to_jwk(WEAK_RSA_KEY), {}, 1, None, [],
        {"kty": "RSA"}, {"kty": "RSA", "n": "!", "e": "AQAB"}, {"kty": "EC", "crv": "P-256"},
        to_jwk(EC_KEY, x="AAAA"), {"kty": ["RSA"]}, {"kty": "RSA", "n": 1, "e": 2},
        {"kty": "EC", "crv": ["P-256"]}, {"kty": "EC", "crv": {"a": 1}},
    ],
)  # fmt: skip
def test_keys_that_are_left_out(entry: Any) -> None:
    with pytest.raises(KeySetError, match="no RS256 or ES256 key"):
        parse_key_set(json.dumps({"keys": [entry]}).encode())
    both = parse_key_set(json.dumps({"keys": [entry, to_jwk(EC_KEY, kid="good")]}).encode())
    assert list(both) == ["good"]


@pytest.mark.parametrize("text", [b"", b"{", b"1", b"[]", b'{"keys": {}}', b" " * 300_000])
def test_what_is_no_key_set(text: bytes) -> None:
    with pytest.raises(KeySetError):
        parse_key_set(text)


def test_a_key_set_has_a_bounded_size(tmp_path: Path) -> None:
    file = Path(write_keys(tmp_path, to_jwk(EC_KEY, kid="e")))
    largest = file.read_bytes().ljust(_MAX_BYTES)
    file.write_bytes(largest)
    assert list(parse_key_set(read_file(str(file)))) == ["e"]
    file.write_bytes(largest + b" ")
    with pytest.raises(KeySetError, match=f"more than {_MAX_BYTES} bytes"):
        parse_key_set(read_file(str(file)))
