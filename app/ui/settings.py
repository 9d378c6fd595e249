"""The settings of the web page, read from the environment; the source of `docs/settings.md`."""

import ipaddress
from typing import Annotated

from pydantic import BeforeValidator, Field, HttpUrl, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

MIN_SECRET_CHARACTERS = 32


def _split_at_commas(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


CommaSeparated = Annotated[list[str], NoDecode, BeforeValidator(_split_at_commas)]


class UiSettings(BaseSettings):
    """Settings of `python -m app ui`, which needs none of the API's."""

    model_config = SettingsConfigDict(
        env_prefix="",
        populate_by_name=True,
        extra="ignore",
        hide_input_in_errors=True,
        title="Web page",
    )

    host: str = Field("127.0.0.1", alias="LLM_UI_HOST", description="Address the web page binds.")
    port: int = Field(
        8888, alias="LLM_UI_PORT", ge=0, le=65535, description="Port the web page binds."
    )
    api_url: HttpUrl = Field(
        HttpUrl("http://127.0.0.1:8887"),
        alias="LLM_UI_API_URL",
        description="Where the web page reaches the API.",
    )
    public_api_url: HttpUrl | None = Field(
        None,
        alias="LLM_UI_PUBLIC_API_URL",
        description="The API's address in the commands that the web page shows to copy. Unset: "
        "LLM_UI_API_URL.",
    )
    allowed_hosts: CommaSeparated = Field(
        default=["localhost", "127.0.0.1", "[::1]"],
        alias="LLM_UI_ALLOWED_HOSTS",
        description="Comma-separated names by which browsers may call the web page (a guard against "
        "DNS rebinding); `*` allows any.",
    )
    trusted_proxies: CommaSeparated = Field(
        default=["127.0.0.1", "::1"],
        alias="LLM_TRUSTED_PROXIES",
        description="Comma-separated addresses and networks whose `X-Forwarded-For` and "
        "`X-Forwarded-Proto` are believed: the reverse proxy's.",
    )
    idle_connection_seconds: int = Field(
        180,
        alias="LLM_IDLE_CONNECTION_SECONDS",
        ge=5,
        le=3_600,
        description="How long a connection without a request is kept, in seconds; longer than a reverse "
        "proxy keeps its own.",
    )
    max_idle_connections: int = Field(
        500,
        alias="LLM_MAX_IDLE_CONNECTIONS",
        ge=1,
        description="Most connections without a request that the page's process keeps; above that the "
        "oldest is closed.",
    )
    secret: SecretStr | None = Field(
        None,
        alias="LLM_UI_SECRET",
        description="Seals the cookie that holds a browser's token; the same for all replicas, at "
        f"least {MIN_SECRET_CHARACTERS} characters (`openssl rand -base64 32`). Unset: a new one at "
        "each start, so that a restart ends all sign-ins.",
    )
    session_hours: float = Field(
        12.0,
        alias="LLM_UI_SESSION_HOURS",
        gt=0,
        le=720,
        description="How long a sign-in lasts, in hours.",
    )
    max_upload_bytes: int = Field(
        200_000_000,
        alias="LLM_UI_MAX_UPLOAD_BYTES",
        ge=1_000,
        le=10_000_000_000,
        description="Largest file that the web page takes for a bulk job, in bytes.",
    )
    allow_unauthenticated: bool = Field(
        False,
        alias="LLM_ALLOW_UNAUTHENTICATED",
        description="Permit the web page on an address that is not loopback although the API asks for "
        "no token.",
    )

    @field_validator("trusted_proxies")
    @classmethod
    def _are_addresses(cls, addresses: list[str]) -> list[str]:
        for address in addresses:
            if address:
                ipaddress.ip_network(address)  # its error names the problem
        return [address for address in addresses if address]

    @field_validator("secret")
    @classmethod
    def _strong(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is None or not secret.get_secret_value():
            return None
        if len(secret.get_secret_value()) < MIN_SECRET_CHARACTERS:
            raise ValueError(f"must have at least {MIN_SECRET_CHARACTERS} characters")
        return secret

    @property
    def shown_api_url(self) -> str:
        """The API's public address, without a slash at its end."""
        return str(self.public_api_url or self.api_url).rstrip("/")
