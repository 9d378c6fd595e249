"""`python -m app token`: API keys in the database; JWTs by secret or issuer's keys only.

Results go to standard output, so that they can be piped; remarks go to standard error.
"""

import argparse
import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import jwt
from pydantic import SecretStr, TypeAdapter, ValidationError

from app.api.startup_checks import secret_weakness
from app.auth.api_keys import is_prefix, prefix_of
from app.auth.jwt_claims import MaxPriority, Team, TokenId, to_principal
from app.auth.jwt_verifier import (
    KEY_ALGORITHMS,
    JwtVerifier,
    decode_with_secret,
    encode_with_secret,
)
from app.auth.principal import SCOPES, Scope
from app.auth.token_store import TokenStore
from app.cli.arguments import Subcommands, add_command, add_subcommands
from app.cli.database import store_command
from app.cli.table import write_table
from app.core.errors import InvalidTokenError, ServiceError
from app.core.settings import Settings

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_MAX_DAYS = 36_500

_EPILOG = """examples:
  python -m app token create --team red --name laptop --expires 90d
      prints a key, once:  curl -H "Authorization: Bearer llm_..." http://127.0.0.1:8887/models/
  python -m app token list --team red
  python -m app token revoke llm_0123456789ab
  python -m app token revoke --team red --token-id ci-7         (a JWT, by its claims)
  JWT_SECRET=... python -m app token jwt encode '{"team_id": "red", "token_id": "ci-7"}'
  JWT_SECRET=... python -m app token jwt decode eyJ...

API keys are for people and programs; they are rows of the database (LLM_DATABASE_*). Any holder of
JWT_SECRET can make JWTs, which need no database. Both are revoked here, and every replica refuses
them within a second. More: docs/authentication.md."""

_JWT_EPILOG = """The secret is JWT_SECRET of the environment, or else --secret (others on the machine
see the arguments of a command). RS256 and ES256 tokens are read by LLM_JWKS, LLM_JWT_ISSUER and
LLM_JWT_AUDIENCE. `decode` ends with status 1 if the service would not take the token.

examples:
  ... encode '{"team_id": "tenstorrent", "token_id": "debug-test"}'
  ... encode --expires 1h '{"team_id": "red", "token_id": "ci-7", "scopes": ["use", "operate"]}'
  ... decode eyJ..."""

_on_tokens = store_command("token", TokenStore)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    actions = add_subcommands(parser)
    _add_create(actions)
    listing = add_command(actions, "list", "List keys, and JWTs that were revoked.", _list)
    listing.add_argument("--team", type=_checked(Team), help="of this team only")
    revoke = add_command(actions, "revoke", "Revoke a key or a JWT permanently.", _revoke)
    what = revoke.add_mutually_exclusive_group(required=True)
    what.add_argument("key", nargs="?", type=_key_name, help="id or prefix of a key (`list`)")
    what.add_argument("--token-id", type=_checked(TokenId), help="token_id of a JWT, with --team")
    revoke.add_argument("--team", type=_checked(Team), help="team_id of the JWT")
    _add_jwt(actions)


def _add_create(actions: Subcommands) -> None:
    add = add_command(actions, "create", "Make an API key; it is shown once.", _create).add_argument
    add("--team", required=True, type=_checked(Team), help="the team whose results it opens")
    add("--name", default="", help="its purpose; shown by `list`")
    text = "`use` (send and read; the default), `operate` (load models, ...), or use,operate"
    add("--scopes", type=_scopes, default=["use"], help=text)
    add("--expires", type=_duration, help="30m, 12h, 90d, 4w (never)")
    text = "highest priority of its requests, 0 to 100 (0)"
    add("--max-priority", type=_checked(MaxPriority), default=0, help=text)


def _add_jwt(actions: Subcommands) -> None:
    text = "Make JWTs signed with a secret (HS256), and read JWTs."
    parser = add_command(actions, "jwt", text, epilog=_JWT_EPILOG)
    parser.add_argument("--secret", help="the secret, if JWT_SECRET is not set")
    actions = add_subcommands(parser)
    encode = add_command(actions, "encode", "Make a token from claims.", _encode)
    encode.add_argument("claims", type=_claims, help="a JSON object with team_id and token_id")
    encode.add_argument("--expires", type=_duration, help="adds iat and exp: 30m, 12h, 90d, 4w")
    text = "Show a token's claims, and whether it is good."
    add_command(actions, "decode", text, _decode).add_argument("token")


# --- arguments --------------------------------------------------------------------------------------


def _checked(kind: Any) -> Callable[[str], Any]:
    adapter: TypeAdapter[Any] = TypeAdapter(kind)

    def check(text: str) -> Any:
        try:
            return adapter.validate_python(text)
        except ValidationError as error:
            raise argparse.ArgumentTypeError(error.errors()[0]["msg"]) from None

    return check


def _scopes(text: str) -> list[Scope]:
    asked = {part.strip() for part in text.split(",")}
    if not asked <= set(SCOPES):
        raise argparse.ArgumentTypeError(f"only {' and '.join(SCOPES)}, with a comma between them")
    return [scope for scope in SCOPES if scope in asked]


def _duration(text: str) -> timedelta:
    match = re.fullmatch(r"([1-9]\d{0,8})([smhdw])", text)
    found = timedelta(**{_UNITS[match[2]]: int(match[1])}) if match else None
    if found is None or found.days > _MAX_DAYS:
        raise argparse.ArgumentTypeError("a number and s, m, h, d or w: 90d; at most 100 years")
    return found


def _key_name(text: str) -> UUID | str:
    """An id or a prefix. A whole key is also accepted: an operator has that of a leaked one."""
    prefix = text if is_prefix(text) else prefix_of(text)
    try:
        return prefix or UUID(text)
    except ValueError:
        raise argparse.ArgumentTypeError("neither an id nor a prefix as `list` shows") from None


def _claims(text: str) -> dict[str, Any]:
    try:
        claims = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"invalid JSON: {error}") from None
    if not isinstance(claims, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return claims


# --- keys -------------------------------------------------------------------------------------------


@_on_tokens
async def _create(store: TokenStore, options: argparse.Namespace) -> None:
    key = await store.create(
        options.team,
        name=options.name,
        scopes=options.scopes,
        lifetime=options.expires,
        max_priority=options.max_priority,
    )
    sys.stdout.write(f"{key.text}\n")
    _report(f"Store it: it is shown only once. `token revoke {key.prefix}` ends it.")


@_on_tokens
async def _list(store: TokenStore, options: argparse.Namespace) -> None:
    head = ["ID", "PREFIX", "TEAM", "NAME", "SCOPES", "MAX PRIORITY", "CREATED", "EXPIRES",
            "LAST USED", "REVOKED"]  # fmt: skip
    rows = [
        [str(key.id), key.prefix, key.team_id, key.name, ",".join(key.scopes),
         str(key.max_priority), _time(key.created_at), _time(key.expires_at),
         _time(key.last_used_at), _time(key.revoked_at)]
        for key in await store.list(options.team)
    ]  # fmt: skip
    write_table([head, *rows])
    if revoked := await store.list_revoked(options.team):
        sys.stdout.write("\n")
        ended = [[one.team_id, one.token_id, _time(one.revoked_at)] for one in revoked]
        write_table([["TEAM", "TOKEN ID", "REVOKED"], *ended])


def _revoke(options: argparse.Namespace) -> int:
    if options.token_id is None:
        return _revoke_key(options)
    if options.team is None:
        return _fail("--token-id needs --team: two teams may use the same id.")
    return _revoke_token(options)


@_on_tokens
async def _revoke_key(store: TokenStore, options: argparse.Namespace) -> None:
    is_id = isinstance(options.key, UUID)
    key = await store.revoke(options.key if is_id else None, prefix=None if is_id else options.key)
    _report(f"The key {key.prefix} of team {key.team_id} is revoked.")


@_on_tokens
async def _revoke_token(store: TokenStore, options: argparse.Namespace) -> None:
    await store.revoke_token(options.team, options.token_id)
    _report(f"The JWTs {options.token_id} of team {options.team} are revoked.")


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
