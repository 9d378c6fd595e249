"""Commands of `python -m app token`: API keys in the database; JWTs by secret or issuer's keys only.

Results go to standard output, so that they can be piped; remarks go to standard error.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from uuid import UUID

import jwt
from pydantic import SecretStr

from app.api.startup_checks import secret_weakness
from app.auth.jwt_claims import to_principal
from app.auth.jwt_verifier import (
    KEY_ALGORITHMS,
    JwtVerifier,
    decode_with_secret,
    encode_with_secret,
)
from app.auth.token_store import TokenStore
from app.cli.database import with_database
from app.cli.table import write_table
from app.core.errors import InvalidTokenError, ServiceError
from app.core.settings import Settings

# --- keys -------------------------------------------------------------------------------------------


def _with_store(work: Callable[[TokenStore], Awaitable[None]]) -> int:
    return with_database("token", lambda database, settings: work(TokenStore(database, settings)))


def _create(options: argparse.Namespace) -> int:
    async def work(store: TokenStore) -> None:
        key = await store.create(
            options.team,
            name=options.name,
            scopes=options.scopes,
            lifetime=options.expires,
            max_priority=options.max_priority,
        )
        sys.stdout.write(f"{key.text}\n")
        _report(f"Store it: it is shown only once. `token revoke {key.prefix}` ends it.")

    return _with_store(work)


def _list(options: argparse.Namespace) -> int:
    async def work(store: TokenStore) -> None:
        head = ["ID", "PREFIX", "TEAM", "NAME", "SCOPES", "MAX PRIORITY", "CREATED", "EXPIRES",
                "LAST USED", "REVOKED"]  # fmt: skip
        rows = [
            [str(key.id), key.prefix, key.team_id, key.name, ",".join(key.scopes),
             str(key.max_priority), _time(key.created_at), _time(key.expires_at),
             _time(key.last_used_at), _time(key.revoked_at)]
            for key in await store.list(options.team)
        ]  # fmt: skip
        write_table([head, *rows])
        revoked = await store.list_revoked(options.team)
        if revoked:
            sys.stdout.write("\n")
            ended = [[one.team_id, one.token_id, _time(one.revoked_at)] for one in revoked]
            write_table([["TEAM", "TOKEN ID", "REVOKED"], *ended])

    return _with_store(work)


def _revoke(options: argparse.Namespace) -> int:
    if options.token_id is not None and options.team is None:
        return _fail("--token-id needs --team: two teams may use the same id.")

    async def work(store: TokenStore) -> None:
        if options.token_id is not None:
            await store.revoke_token(options.team, options.token_id)
            _report(f"The JWTs {options.token_id} of team {options.team} are revoked.")
            return
        is_id = isinstance(options.key, UUID)
        key = await store.revoke(
            options.key if is_id else None, prefix=None if is_id else options.key
        )
        _report(f"The key {key.prefix} of team {key.team_id} is revoked.")

    return _with_store(work)


# --- JWTs -------------------------------------------------------------------------------------------


def _encode(options: argparse.Namespace) -> int:
    secret = _secret(options)
    if secret is None:
        return 2
    claims = dict(options.claims)
    if options.expires is not None:
        now = int(time.time())
        claims |= {"iat": now, "exp": now + int(options.expires.total_seconds())}
    try:
        to_principal(claims)
        token = encode_with_secret(claims, secret)
    except (InvalidTokenError, jwt.PyJWTError, TypeError) as error:
        return _fail(f"The service would refuse this token: {error}")
    sys.stdout.write(f"{token}\n")
    return 0


def _decode(options: argparse.Namespace) -> int:
    try:
        found = jwt.decode_complete(options.token, options={"verify_signature": False})
    except jwt.PyJWTError as error:
        return _fail(f"This is not a JWT: {error}")
    sys.stdout.write(json.dumps(found["payload"], indent=2, ensure_ascii=False) + "\n")
    is_issued = found["header"].get("alg") in KEY_ALGORITHMS
    secret = None if is_issued else _secret(options)
    if secret is None and not is_issued:
        return 2
    try:
        if secret is None:
            asyncio.run(_verify_issued(options.token))
        else:
            to_principal(decode_with_secret(options.token, secret))
    except (ServiceError, jwt.PyJWTError) as error:
        return _fail(f"The service would refuse this token: {error}")
    _report("The signature verifies, and the claims are valid. (Revocations are not checked.)")
    return 0


async def _verify_issued(token: str) -> None:
    """Verify as the service does, by the issuer's keys (LLM_JWKS), without the database."""
    unused = ("database_host", "database_user", "database_password", "database_name")
    await JwtVerifier(Settings.model_validate(dict.fromkeys(unused, "unused"))).verify(token)


def _secret(options: argparse.Namespace) -> SecretStr | None:
    text = os.environ.get("JWT_SECRET") or options.secret
    if not text:
        _fail("Set JWT_SECRET (or --secret).")
        return None
    weakness = secret_weakness(text)
    if weakness:
        _report(f"Warning: the secret {weakness}; the service accepts it on loopback only.")
    return SecretStr(text)


# --- output -----------------------------------------------------------------------------------------


def _time(moment: datetime | None) -> str:
    return "-" if moment is None else f"{moment:%Y-%m-%d %H:%M}"


def _report(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _fail(text: str) -> int:
    _report(text)
    return 1


RUN: dict[str, Callable[[argparse.Namespace], int]] = {
    "create": _create,
    "list": _list,
    "revoke": _revoke,
    "encode": _encode,
    "decode": _decode,
}
