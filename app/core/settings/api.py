"""The HTTP API: addresses, bounds and authentication."""

import ipaddress
from typing import Literal, Self

from pydantic import AliasChoices, Field, SecretStr, field_validator, model_validator

from app.core.settings.fields import Names, Optional, Section


class HttpSettings(Section, title="HTTP"):
    host: str = "127.0.0.1"
    """Address the API binds."""
    port: int = Field(8887, ge=0, le=65535)
    """Port the API binds."""
    allow_unauthenticated: bool = False
    """Permit an API without authentication on an address that is not loopback (development behind a
    container's port map). Each start logs a warning."""
    allowed_hosts: Names = Field(["localhost", "127.0.0.1", "[::1]"])
    """Comma-separated names accepted in the Host and Origin headers (a guard against DNS
    rebinding). While authentication is on and this is not set, any Host is accepted, and an Origin
    that is the Host."""
    trusted_proxies: Names = Field(["127.0.0.1", "::1"])
    """Comma-separated addresses and networks whose `X-Forwarded-For` and `X-Forwarded-Proto` are
    trusted: the reverse proxy, and the web page, which forwards its visitors' addresses."""
    local_clients: Names = Field(["127.0.0.0/8", "::1"])
    """Comma-separated addresses and networks of clients on this machine. While authentication is off, a
    reverse proxy's request for any other client is refused: a proxy would publish an open API."""
    published_address: Optional[str] = None
    """Address on which a reverse proxy in front of the API is published, if the deployment knows it.
    While authentication is off, the API only starts if it is loopback."""
    max_body_bytes: int = Field(2_000_000, ge=1_000, le=100_000_000)
    """Largest request body, in bytes; a larger one returns 413."""
    max_file_bytes: int = Field(200_000_000, ge=1_000, le=10_000_000_000)
    """Largest file of `POST /v1/files`, in bytes; a larger one returns 413."""
    team_max_file_bytes: int = Field(10_000_000_000, ge=0)
    """Most bytes of all files of one team, including those of its batches; an upload beyond it
    returns 400. 0: no limit."""
    max_wait_seconds: float = Field(60.0, ge=0, le=600)
    """Longest long-poll (`?wait=`, `Prefer: wait=`), in seconds."""
    max_waiters: int = Field(10_000, ge=1)
    """Most long-polls that one API process holds; a further one returns 503."""
    max_streams: int = Field(2_000, ge=1)
    """Most event streams, exports and downloads that one API process holds; a further one returns
    503."""
    max_bytes_in_flight: int = Field(256 * 2**20, ge=64 * 2**20)
    """Memory of one API process for the texts of requests and responses, in bytes; at least 16 times
    LLM_MAX_BODY_BYTES. A text counts four times its size, one of at most 8 KiB not at all. A request
    waits up to 10 seconds for its part, then it returns 503; a team has as much as it leaves free."""
    keep_alive_seconds: float = Field(15.0, gt=0, le=300)
    """Interval at which an idle stream gets a comment, so that no proxy closes it."""
    idle_connection_seconds: int = Field(180, ge=5, le=3_600)
    """How long a connection without a request is kept, in seconds; longer than a reverse proxy and its
    clients keep theirs, whose requests would else meet its end."""
    max_idle_connections: int = Field(500, ge=1)
    """Most connections without a request that one process keeps; above that the oldest is closed."""
    ticket_seconds: float = Field(60.0, gt=0, le=3600)
    """How long a stream ticket may be redeemed, once."""
    health: Literal["process", "engine"] = "process"
    """Meaning of `GET /health`, `GET /ping` and `GET /`. `process`: 200 while the process responds.
    `engine`: 503 while no model can generate, for load balancers that expect it. `/health/live`
    never depends on the engine: liveness probes use it. See docs/observability.md#health."""

    hosted_tools: Literal["skip", "refuse"] = "skip"
    """Tools that OpenAI or Anthropic would run, such as `web_search`, in a request. `skip`: they are left
    out, and the header `X-Warning` names them. `refuse`: the request returns 400. See
    docs/responses.md#tools and docs/anthropic.md#requests."""
    tgi_generate: Literal["current", "first"] = "current"
    """Version of Text Generation Inference that `POST /generate` speaks. `first`: that of 2022, for
    clients that expect a list, with the prompt before the text. See docs/tgi.md#the-first-version."""

    @field_validator("trusted_proxies", "local_clients")
    @classmethod
    def _are_addresses(cls, addresses: list[str]) -> list[str]:
        for address in addresses:
            if address:
                ipaddress.ip_network(address)  # its error names the fault
        return [address for address in addresses if address]


class AuthenticationSettings(Section, title="Authentication"):
    auth: Literal["auto", "on", "off"] = "auto"
    """`on`: every request needs an API key or a JWT. `off`: no request does; only permitted on
    loopback. `auto`: on if JWT_SECRET or LLM_JWKS is set."""
    jwt_secret: Optional[SecretStr] = Field(None, alias="JWT_SECRET")
    """Secret that signs HS256 tokens; 32 random bytes or more (`openssl rand -base64 32`). A weak
    one is only permitted on loopback."""
    jwks: Optional[str] = None
    """Public keys (JWKS) of an issuer of RS256 or ES256 tokens: a file or an https URL. Needs
    LLM_JWT_ISSUER and LLM_JWT_AUDIENCE."""
    jwt_issuer: Optional[str] = None
    """Required `iss` of tokens that LLM_JWKS verifies."""
    jwt_audience: Optional[str] = None
    """Required `aud` of tokens that LLM_JWKS verifies."""
    auth_failures_per_minute: int = Field(
        20,
        validation_alias=AliasChoices(
            "LLM_AUTH_FAILURES_PER_MINUTE", "LLM_FAILED_ATTEMPTS_PER_MINUTE"
        ),
        ge=0,
        le=100_000,
    )
    """Wrong tokens that one address may send to one API process per minute; a further one returns
    429. 0: no limit."""

    @model_validator(mode="after")
    def _check_issuer(self) -> Self:
        if self.jwks and not (self.jwt_issuer and self.jwt_audience):
            raise ValueError("LLM_JWKS needs LLM_JWT_ISSUER and LLM_JWT_AUDIENCE")
        if self.jwks and "://" in self.jwks and not self.jwks.lower().startswith("https://"):
            raise ValueError("LLM_JWKS must be a file or an https URL")
        return self

    @property
    def is_authenticated(self) -> bool:
        if self.auth == "auto":
            return self.jwt_secret is not None or self.jwks is not None
        return self.auth == "on"
