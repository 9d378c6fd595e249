"""`python -m app token`: its arguments, their validation and their help. `token_commands` runs it."""

import argparse
import json
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

from pydantic import TypeAdapter, ValidationError

from app.auth.api_keys import is_prefix, prefix_of
from app.auth.jwt_claims import MaxPriority, Team, TokenId
from app.auth.principal import SCOPES, Scope
from app.cli.arguments import Subcommands, add_command, add_subcommands

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


def add_to(commands: Subcommands) -> None:
    text = "Make, list and revoke API keys and JWTs."
    parser = add_command(commands, "token", text, epilog=_EPILOG)
    actions = add_subcommands(parser)

    create = add_command(actions, "create", "Make an API key; it is shown once.", _run)
    create.add_argument(
        "--team", required=True, type=_checked(Team), help="the team whose results it opens"
    )
    create.add_argument("--name", default="", help="its purpose; shown by `list`")
    create.add_argument(
        "--scopes", type=_scopes, default=["use"],
        help="`use` (send and read; the default), `operate` (load models, ...), or use,operate",
    )  # fmt: skip
    create.add_argument("--expires", type=_duration, help="30m, 12h, 90d, 4w (never)")
    create.add_argument(
        "--max-priority", type=_checked(MaxPriority), default=0,
        help="highest priority of its requests, 0 to 100 (0)",
    )  # fmt: skip

    listing = add_command(actions, "list", "List keys, and JWTs that were revoked.", _run)
    listing.add_argument("--team", type=_checked(Team), help="of this team only")

    revoke = add_command(actions, "revoke", "Revoke a key or a JWT permanently.", _run)
    what = revoke.add_mutually_exclusive_group(required=True)
    what.add_argument("key", nargs="?", type=_key_name, help="id or prefix of a key (`list`)")
    what.add_argument("--token-id", type=_checked(TokenId), help="token_id of a JWT, with --team")
    revoke.add_argument("--team", type=_checked(Team), help="team_id of the JWT")

    _add_jwt(actions)


def _add_jwt(actions: Subcommands) -> None:
    text = "Make JWTs signed with a secret (HS256), and read JWTs."
    parser = add_command(actions, "jwt", text, epilog=_JWT_EPILOG)
    parser.add_argument("--secret", help="the secret, if JWT_SECRET is not set")
    actions = add_subcommands(parser)
    encode = add_command(actions, "encode", "Make a token from claims.", _run)
    encode.add_argument("claims", type=_claims, help="a JSON object with team_id and token_id")
    encode.add_argument("--expires", type=_duration, help="adds iat and exp: 30m, 12h, 90d, 4w")
    decode = add_command(actions, "decode", "Show a token's claims, and whether it is good.", _run)
    decode.add_argument("token")


def _run(options: argparse.Namespace) -> int:
    from app.cli import token_commands

    return token_commands.RUN[options.command](options)


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
    if is_prefix(text):
        return text
    prefix = prefix_of(text)
    if prefix is not None:
        return prefix
    try:
        return UUID(text)
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
