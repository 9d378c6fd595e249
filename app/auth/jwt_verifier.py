"""Verification of JWTs: HS256 by JWT_SECRET; RS256 and ES256 by the issuer's keys.

Each key is used with its own algorithm only. The token's header selects the secret or the issuer's
keys, and among these a key by `kid`; it has no other influence.
"""

import time
import warnings
from dataclasses import dataclass
from typing import Any

import jwt
from pydantic import SecretStr

from app.auth.jwks import SigningKeys
from app.auth.jwt_claims import to_principal
from app.auth.principal import Principal
from app.core.errors import InvalidTokenError
from app.core.settings import Settings

LEEWAY_SECONDS = 5.0  # tolerated difference between the issuer's clock and this one
MIN_SECRET_BYTES = 32  # RFC 7518, 3.2
MAX_TOKEN_BYTES = 8192

KEY_ALGORITHMS = ("RS256", "ES256")
_SECRET_ALGORITHM = "HS256"  # noqa: S105 - a name, not a secret


@dataclass(slots=True, frozen=True)
class Verified:
    """The principal of a valid token, and its remaining seconds (None: no expiry)."""

    principal: Principal
    seconds_left: float | None


class JwtVerifier:
    """Checks signature, times, issuer, audience and claims, but no revocations."""

    def __init__(self, settings: Settings) -> None:
        self._secret = settings.jwt_secret
        self._issuer = settings.jwt_issuer
        self._audience = settings.jwt_audience
        self.keys = SigningKeys(settings.jwks) if settings.jwks else None

    async def verify(self, token: str) -> Verified:
        try:
            header = jwt.get_unverified_header(token)
        except jwt.PyJWTError:
            raise InvalidTokenError(
                "invalid API key: it is neither one of this service (`llm_...`) nor a JWT"
            ) from None
        try:
            if header.get("alg") == _SECRET_ALGORITHM and self._secret is not None:
                claims = decode_with_secret(token, self._secret)
                self._check_issuer_and_audience(claims)
            else:
                claims = await self._decode_with_key(token, header)
        except jwt.PyJWTError as error:
            # PyJWT's message never quotes the token.
            raise InvalidTokenError(str(error)[:200] or "it could not be read") from None
        principal = to_principal(claims)
        if "exp" not in claims:
            return Verified(principal, None)
        return Verified(principal, float(claims["exp"]) + LEEWAY_SECONDS - time.time())

    async def _decode_with_key(self, token: str, header: dict[str, Any]) -> dict[str, Any]:
        if self.keys is None or header.get("alg") not in KEY_ALGORITHMS:
            raise jwt.InvalidAlgorithmError("The specified alg value is not allowed")
        key = await self.keys.find(header.get("kid"))
        return jwt.decode(
            token,
            key,
            algorithms=[key.algorithm_name],
            issuer=self._issuer,
            audience=self._audience,
            options={"require": ["exp"]},
            leeway=LEEWAY_SECONDS,
        )

    def _check_issuer_and_audience(self, claims: dict[str, Any]) -> None:
        """Both are optional in tokens by the secret, and must be the configured ones if present."""
        if "iss" in claims and claims["iss"] != self._issuer:
            raise jwt.InvalidIssuerError("Invalid issuer")
        if "aud" in claims:
            named = claims["aud"] if isinstance(claims["aud"], list) else [claims["aud"]]
            if self._audience not in named:
                raise jwt.InvalidAudienceError("Audience doesn't match")


def decode_with_secret(token: str, secret: SecretStr) -> dict[str, Any]:
    """Decode an HS256 token and check its times. Raises PyJWTError."""
    with warnings.catch_warnings():
        # The startup checks report a short secret once.
        warnings.simplefilter("ignore", jwt.InsecureKeyLengthWarning)
        return jwt.decode(
            token,
            secret.get_secret_value(),
            algorithms=[_SECRET_ALGORITHM],
            options={"verify_aud": False, "verify_iss": False},
            leeway=LEEWAY_SECONDS,
        )


def encode_with_secret(claims: dict[str, Any], secret: SecretStr) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jwt.InsecureKeyLengthWarning)
        return jwt.encode(claims, secret.get_secret_value(), algorithm=_SECRET_ALGORITHM)
