"""Every setting once: environment name, unit, default and bound.

Settings are built in `cli` and handed down; nothing reads the environment at import.
`docs/settings.md` is generated from this file.
"""

import ipaddress
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

DEFAULT_TEAM = "default"
# Shorter, and who waits for a result, or is told of it, might find it gone.
MIN_RETAIN_SECONDS = 60.0
MAX_RETAIN_SECONDS = 3_153_600_000.0  # a hundred years


def _split_at_commas(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


# The environment holds it as text between commas, not as JSON.
_Names = Annotated[list[str], NoDecode, BeforeValidator(_split_at_commas)]


def _none_if_empty(value: object) -> object:
    return None if value == "" else value


# A variable that is set to nothing is not set: environment files have such lines.
_T = TypeVar("_T")
_Optional = Annotated[_T | None, BeforeValidator(_none_if_empty)]
_RetainSeconds = _Optional[Annotated[float, Field(ge=MIN_RETAIN_SECONDS, le=MAX_RETAIN_SECONDS)]]


class LogSettings(BaseSettings):
    """How every command logs; read before all other settings, so that their faults are logged so."""

    model_config = SettingsConfigDict(env_prefix="", populate_by_name=True, extra="ignore")

    # --- Log ------------------------------------------------------------------------------------
    format: Literal["text", "json"] = Field(
        "text",
        alias="LLM_LOG_FORMAT",
        description="`text`: lines for people. `json`: an object a line, with the ids of request, "
        "result, worker, attempt and team as members.",
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        "info",
        alias="LLM_LOG_LEVEL",
        description="The least that is logged. `debug` tells each request and each result, without "
        "their texts.",
    )
    content: bool = Field(
        False,
        alias="LLM_LOG_CONTENT",
        description="Log the prompt and the answer of each result too (10,000 characters of each), and "
        "what errors quote of them. For development: the log then holds what your users say.",
    )


class Settings(BaseSettings):
    """The service's settings, read from the environment; names and units as in `docs/settings.md`."""

    model_config = SettingsConfigDict(
        env_prefix="",
        populate_by_name=True,
        extra="ignore",
        hide_input_in_errors=True,  # it may be a secret
    )

    # --- Database -------------------------------------------------------------------------------
    database_host: str = Field(
        alias="LLM_DATABASE_URL",
        description="PostgreSQL server, as `host` or `host:port`. Several, with commas between them, "
        "are a primary and its standbys: the one that takes writes is used. See docs/failover.md.",
        min_length=1,
    )
    database_user: str = Field(
        alias="LLM_DATABASE_ADMIN_USER", description="PostgreSQL role.", min_length=1
    )
    database_password: SecretStr = Field(
        alias="LLM_DATABASE_PASSWORD", description="Password of the role."
    )
    database_name: str = Field(alias="LLM_DATABASE_DB", description="Database name.", min_length=1)
    database_pool_size: int = Field(
        8,
        alias="LLM_DATABASE_POOL_SIZE",
        ge=2,
        le=200,
        description="Most PostgreSQL connections of one process, besides its listener and heartbeat.",
    )
    database_timeout_seconds: float = Field(
        10.0,
        alias="LLM_DATABASE_TIMEOUT_SECONDS",
        gt=0,
        le=300,
        description="How long a request waits for a database that is away before it answers 503.",
    )

    # --- Triton ---------------------------------------------------------------------------------
    triton_grpc: str = Field(
        "127.0.0.1:8001",
        alias="TRITON_GRPC_SERVICE",
        description="Triton's gRPC address, `host:port`: the one the service speaks to. Several, with "
        "commas between them, share the results of the models that each has; none (empty) where all "
        "servers are registered or launched. See docs/servers.md.",
    )
    triton_http: str = Field(
        "127.0.0.1:8000",
        alias="TRITON_HTTP_SERVICE",
        description="Triton's HTTP address, `host:port`; as many as there are gRPC addresses. Shown by "
        "`GET /servers`: the service speaks gRPC.",
    )
    triton_metrics: str = Field(
        "127.0.0.1:8002",
        alias="TRITON_METRICS_SERVICE",
        description="Triton's metrics address, `host:port`; as many as there are gRPC addresses. "
        "Shown by `GET /servers`.",
    )
    triton_refresh_seconds: float = Field(
        2.0,
        alias="LLM_TRITON_REFRESH_SECONDS",
        gt=0,
        le=60,
        description="How often each process asks Triton which models are ready.",
    )
    engine_silence_seconds: float = Field(
        30.0,
        alias="LLM_ENGINE_SILENCE_SECONDS",
        ge=1,
        le=3600,
        description="How long all results of a model on a server may be without a token, and a probe of one "
        "token without an answer, until the engine counts as dead and its results run elsewhere. "
        "Raise it where an engine needs longer to read one prompt.",
    )
    model_repository: Path = Field(
        Path("models"),
        alias="LLM_MODEL_REPOSITORY",
        description="Triton model repository from which tokenizers and chat templates are read.",
    )

    default_model: _Optional[Annotated[str, Field(max_length=256)]] = Field(
        None,
        alias="LLM_DEFAULT_MODEL",
        description="Model of the routes that name none (TGI's, and `/inference`). Unset: the only "
        "model that is ready.",
    )

    # --- HTTP -----------------------------------------------------------------------------------
    host: str = Field("127.0.0.1", alias="LLM_HOST", description="Address the API binds.")
    port: int = Field(8887, alias="LLM_PORT", ge=0, le=65535, description="Port the API binds.")
    allow_unauthenticated: bool = Field(
        False,
        alias="LLM_ALLOW_UNAUTHENTICATED",
        description="Permit an API without authentication on an address that is not loopback "
        "(development behind a container's port map). Told at every start.",
    )
    allowed_hosts: _Names = Field(
        default=["localhost", "127.0.0.1", "[::1]"],
        alias="LLM_ALLOWED_HOSTS",
        description="Comma-separated names accepted in the Host and Origin headers (a guard "
        "against DNS rebinding). While authentication is on and this is not set, any Host is "
        "accepted, and an Origin that is the Host.",
    )
    trusted_proxies: _Names = Field(
        default=["127.0.0.1", "::1"],
        alias="LLM_TRUSTED_PROXIES",
        description="Comma-separated addresses and networks whose `X-Forwarded-For` and "
        "`X-Forwarded-Proto` are believed: the reverse proxy's, and the web page's, which hands on its visitors'.",
    )
    max_body_bytes: int = Field(
        2_000_000,
        alias="LLM_MAX_BODY_BYTES",
        ge=1_000,
        le=100_000_000,
        description="Largest request body, in bytes; larger ones are answered 413.",
    )
    max_file_bytes: int = Field(
        200_000_000,
        alias="LLM_MAX_FILE_BYTES",
        ge=1_000,
        le=10_000_000_000,
        description="Largest file of `POST /v1/files`, in bytes; larger ones are answered 413.",
    )
    team_max_file_bytes: int = Field(
        10_000_000_000,
        alias="LLM_TEAM_MAX_FILE_BYTES",
        ge=0,
        description="Most bytes that the files of one team have together, those of its batches "
        "included; further uploads are answered 400. 0: no limit.",
    )
    max_wait_seconds: float = Field(
        60.0,
        alias="LLM_MAX_WAIT_SECONDS",
        ge=0,
        le=600,
        description="Longest long-poll (`?wait=`, `Prefer: wait=`), in seconds.",
    )
    max_waiters: int = Field(
        10_000,
        alias="LLM_MAX_WAITERS",
        ge=1,
        description="Most long-polls held by one API process; further ones are answered 503.",
    )

    max_streams: int = Field(
        2_000,
        alias="LLM_MAX_STREAMS",
        ge=1,
        description="Most event streams held by one API process; further ones are answered 503.",
    )
    keep_alive_seconds: float = Field(
        15.0,
        alias="LLM_KEEP_ALIVE_SECONDS",
        gt=0,
        le=300,
        description="A stream without news gets a comment this often, so that no proxy takes it "
        "for dead.",
    )
    ticket_seconds: float = Field(
        60.0,
        alias="LLM_TICKET_SECONDS",
        gt=0,
        le=3600,
        description="How long a stream ticket may be redeemed, once.",
    )

    # --- Authentication -------------------------------------------------------------------------
    auth: Literal["auto", "on", "off"] = Field(
        "auto",
        alias="LLM_AUTH",
        description="`on`: every request needs an API key or a JWT. `off`: none does, which is "
        "refused elsewhere than on loopback. `auto`: on if JWT_SECRET or LLM_JWKS is set.",
    )
    jwt_secret: _Optional[SecretStr] = Field(
        None,
        alias="JWT_SECRET",
        description="Secret that HS256 tokens are signed with; 32 random bytes or more "
        "(`openssl rand -base64 32`). A weak one is refused elsewhere than on loopback.",
    )
    jwks: _Optional[str] = Field(
        None,
        alias="LLM_JWKS",
        description="Public keys of an issuer of RS256 or ES256 tokens (JWKS): a file, or an https "
        "URL. Needs LLM_JWT_ISSUER and LLM_JWT_AUDIENCE.",
    )
    jwt_issuer: _Optional[str] = Field(
        None, alias="LLM_JWT_ISSUER", description="The `iss` of tokens by LLM_JWKS."
    )
    jwt_audience: _Optional[str] = Field(
        None, alias="LLM_JWT_AUDIENCE", description="The `aud` of tokens by LLM_JWKS: our name."
    )

    failed_attempts_per_minute: int = Field(
        20,
        alias="LLM_FAILED_ATTEMPTS_PER_MINUTE",
        ge=0,
        le=100_000,
        description="Wrong tokens that one address may try at one API process per minute; further ones "
        "are answered 429. 0: no limit.",
    )

    # --- Results --------------------------------------------------------------------------------
    default_max_tokens: int = Field(
        512,
        alias="LLM_DEFAULT_MAX_TOKENS",
        ge=1,
        description="`max_tokens` of a request that names none (less where the model's length "
        "leaves less). Not of `/v1/completions`, which has OpenAI's 16.",
    )
    max_queued: int = Field(
        1_000_000,
        alias="LLM_MAX_QUEUED",
        ge=1,
        description="Most unclaimed results in the whole queue; further ones are answered 429.",
    )
    team_max_queued: int | None = Field(
        None,
        alias="LLM_TEAM_MAX_QUEUED",
        ge=1,
        description="Most unclaimed results of one team and model, unless `python -m app team` says "
        "otherwise; further ones are answered 429. Unset: no limit.",
    )
    team_max_running: int | None = Field(
        None,
        alias="LLM_TEAM_MAX_RUNNING",
        ge=1,
        description="Most results of one team that run on one model at the same time; others wait. "
        "Unset: no limit.",
    )
    team_requests_per_minute: int | None = Field(
        None,
        alias="LLM_TEAM_REQUESTS_PER_MINUTE",
        ge=1,
        description="Most results a team may send to one model per minute. Unset: no limit.",
    )
    team_tokens_per_minute: int | None = Field(
        None,
        alias="LLM_TEAM_TOKENS_PER_MINUTE",
        ge=1,
        description="Most tokens, of prompts and `max_tokens` together, a team may send to one model "
        "per minute. Unset: no limit.",
    )
    max_attempts: int = Field(
        5,
        alias="LLM_MAX_ATTEMPTS",
        ge=1,
        le=100,
        description="Attempts that Triton took and lost before a result fails.",
    )
    continue_lost_attempts: bool = Field(
        True,
        alias="LLM_CONTINUE_LOST_ATTEMPTS",
        description="Whether the next attempt continues the text of a lost one instead of starting "
        "over ([continuation.md](continuation.md)). A request may opt out.",
    )
    continue_by_text: bool = Field(
        False,
        alias="LLM_CONTINUE_BY_TEXT",
        description="Continue by text on models without the input `resume_token_ids`, as NVIDIA's "
        "backend: the prompt and the text so far are sent as one prompt. The model's tokenizer may "
        "split it otherwise, so that greedy text may differ from that of an undisturbed attempt.",
    )
    default_deadline_seconds: float = Field(
        86_400.0,
        alias="LLM_DEFAULT_DEADLINE_SECONDS",
        gt=0,
        description="Deadline of a result that names none, in seconds from its acceptance.",
    )
    max_deadline_seconds: float = Field(
        604_800.0,
        alias="LLM_MAX_DEADLINE_SECONDS",
        gt=0,
        description="Latest deadline a request may ask for, in seconds.",
    )
    idempotency_seconds: float = Field(
        86_400.0,
        alias="LLM_IDEMPOTENCY_SECONDS",
        ge=1,
        le=31_536_000,
        description="How long an `Idempotency-Key` names the result, or the batch, of its first "
        "request.",
    )

    # --- History --------------------------------------------------------------------------------
    history_days: int = Field(
        30,
        alias="LLM_HISTORY_DAYS",
        ge=1,
        le=3650,
        description="How many days the figures by the minute are kept (`GET /history`, `GET /system`). "
        "They outlive the results that they are about.",
    )

    # --- Retention ------------------------------------------------------------------------------
    retain_results_seconds: _RetainSeconds = Field(
        None,
        alias="LLM_RETAIN_RESULTS_SECONDS",
        description="How long a result is kept from its end on, 60 to 3,153,600,000; then its row is "
        "deleted ([retention.md](retention.md)). `python -m app team retain` says otherwise of a team. "
        "Unset: for ever.",
    )
    retain_prompts_seconds: _RetainSeconds = Field(
        None,
        alias="LLM_RETAIN_PROMPTS_SECONDS",
        description="How long a prompt is kept from the end of the last of its results on, 60 to "
        "3,153,600,000; then its text is erased. Never sent, it is kept. Unset: for ever.",
    )
    retain_logs_days: int = Field(
        90,
        alias="LLM_RETAIN_LOGS_DAYS",
        ge=1,
        le=3650,
        description="How many days records of what is over are kept: deliveries of webhooks, and "
        "launches that ended.",
    )

    # --- Worker ---------------------------------------------------------------------------------
    worker_slots: int = Field(
        256,
        alias="LLM_WORKER_SLOTS",
        ge=1,
        le=10_000,
        description="Results one worker process runs at the same time on each Triton server.",
    )
    lease_seconds: float = Field(
        15.0,
        alias="LLM_LEASE_SECONDS",
        ge=1,
        le=600,
        description="How long a worker may be silent before its results are rescued. It renews "
        "every fifth of it and fences itself at two thirds.",
    )
    poll_seconds: float = Field(
        1.0,
        alias="LLM_POLL_SECONDS",
        gt=0,
        le=60,
        description="A worker with free slots looks at the queue this often even if no "
        "notification came.",
    )
    flush_seconds: float = Field(
        0.5,
        alias="LLM_FLUSH_SECONDS",
        gt=0,
        le=10,
        description="How often a worker writes the text of its running results to the database.",
    )
    grace_seconds: float = Field(
        30.0,
        alias="LLM_GRACE_SECONDS",
        ge=0,
        le=600,
        description="How long a stopping worker lets its results finish before it hands them back.",
    )

    # --- Batches --------------------------------------------------------------------------------
    max_batch_lines: int = Field(
        50_000,
        alias="LLM_MAX_BATCH_LINES",
        ge=1,
        le=200_000,
        description="Most requests of one batch.",
    )
    team_max_batches: int = Field(
        100,
        alias="LLM_TEAM_MAX_BATCHES",
        ge=0,
        le=100_000,
        description="Most batches of one team that have not ended; further ones are answered 429. "
        "0: no limit.",
    )
    batch_in_flight: int = Field(
        500,
        alias="LLM_BATCH_IN_FLIGHT",
        ge=1,
        le=100_000,
        description="Most requests of one batch that are queued or running at the same time.",
    )

    # --- Observability --------------------------------------------------------------------------
    metrics_port: _Optional[Annotated[int, Field(ge=1, le=65535)]] = Field(
        None,
        alias="LLM_METRICS_PORT",
        description="Port on which this process tells its metrics without a token (`GET /metrics`, "
        "and `/health/ready`); a worker has no other. One for each process of a host. Unset: none. "
        "The API has `/metrics` on its own port too, for tokens with the scope `operate`.",
    )
    metrics_host: str = Field(
        "127.0.0.1",
        alias="LLM_METRICS_HOST",
        description="Address of that port. Metrics tell how much each team uses: bind another one "
        "only where a network policy keeps strangers away.",
    )
    otlp_endpoint: _Optional[Annotated[str, Field(pattern=r"^https?://")]] = Field(
        None,
        alias="OTEL_EXPORTER_OTLP_ENDPOINT",
        description="Collector that traces are sent to, by OTLP over HTTP (`http://127.0.0.1:4318`). "
        "OpenTelemetry's other variables hold as well: `OTEL_EXPORTER_OTLP_HEADERS`, "
        "`OTEL_TRACES_SAMPLER`, `OTEL_SERVICE_NAME`. Unset: no traces.",
    )

    # --- Webhooks -------------------------------------------------------------------------------
    webhook_timeout_seconds: float = Field(
        15.0,
        alias="LLM_WEBHOOK_TIMEOUT_SECONDS",
        gt=0,
        le=300,
        description="How long one call of a webhook may take, from its name's resolution to its "
        "status.",
    )
    webhook_rotation_seconds: float = Field(
        86_400.0,
        alias="LLM_WEBHOOK_ROTATION_SECONDS",
        ge=0,
        description="How long webhooks are signed with the previous secret as well, after a "
        "rotation.",
    )
    webhook_allow_private: bool = Field(
        False,
        alias="LLM_WEBHOOK_ALLOW_PRIVATE",
        description="Permit webhooks to loopback, private and link-local addresses (development, "
        "or receivers in your own network). Who may send prompts can then reach what the worker "
        "can.",
    )

    # --- Launches -------------------------------------------------------------------------------
    profiles_file: _Optional[Path] = Field(
        None,
        alias="LLM_PROFILES_FILE",
        description="TOML file of the places where Triton servers can be launched "
        "([launches.md](launches.md)); API and workers read the same. Unset: none.",
    )
    catalogue_file: _Optional[Path] = Field(
        None,
        alias="LLM_CATALOGUE_FILE",
        description="TOML file of the models that are offered for launching; each request reads it "
        "anew. Unset: none.",
    )
    launch_poll_seconds: float = Field(
        10.0,
        alias="LLM_LAUNCH_POLL_SECONDS",
        gt=0,
        le=600,
        description="How often a launch is looked at: its job, its server, its use.",
    )
    launch_lease_seconds: float = Field(
        60.0,
        alias="LLM_LAUNCH_LEASE_SECONDS",
        ge=3,
        le=3600,
        description="How long one such look may take; after that another worker takes the launch.",
    )
    launch_drain_seconds: float = Field(
        60.0,
        alias="LLM_LAUNCH_DRAIN_SECONDS",
        ge=0,
        le=86_400,
        description="How long the results on a server may go on when its launch is stopped.",
    )

    # --- infini-gram ----------------------------------------------------------------------------
    indexes_file: _Optional[Path] = Field(
        None,
        alias="INDEXES_FILE",
        description="TOML file that declares the infini-gram indexes to open "
        "([infini_gram.md](infini_gram.md)). Unset: none.",
    )
    index_threads: int = Field(
        4,
        alias="LLM_INDEX_THREADS",
        ge=1,
        le=64,
        description="Index queries that one process runs at the same time, each on a thread.",
    )
    index_queue: int = Field(
        64,
        alias="LLM_INDEX_QUEUE",
        ge=0,
        le=10_000,
        description="Index queries that wait for a thread; further ones are answered 503.",
    )

    attribution_seconds: float = Field(
        90.0,
        alias="LLM_ATTRIBUTION_SECONDS",
        gt=0,
        le=3600,
        description="How long `POST /{index}/attribution` waits for its answer; then the "
        "attribution is cancelled and answered 503.",
    )
    attribution_cache_seconds: float = Field(
        3600.0,
        alias="LLM_ATTRIBUTION_CACHE_SECONDS",
        ge=0,
        description="How long the same `POST /{index}/attribution` of a team is answered with the "
        "attribution that there is; 0: never.",
    )
    attribution_cache_hit_seconds: float = Field(
        43_200.0,
        alias="LLM_ATTRIBUTION_CACHE_HIT_SECONDS",
        ge=0,
        description="How long from then on, once it was asked for again.",
    )

    @field_validator("database_host")
    @classmethod
    def _names_a_server(cls, text: str) -> str:
        if not split_list(text):
            raise ValueError("it names no server")
        return text

    @field_validator("trusted_proxies")
    @classmethod
    def _are_addresses(cls, addresses: list[str]) -> list[str]:
        for address in addresses:
            if address:
                ipaddress.ip_network(address)  # its error says what is wrong
        return [address for address in addresses if address]

    @model_validator(mode="after")
    def _check_triton(self) -> Self:
        count = len(split_list(self.triton_grpc))
        for name, value in (
            ("TRITON_HTTP_SERVICE", self.triton_http),
            ("TRITON_METRICS_SERVICE", self.triton_metrics),
        ):
            if count > 1 and value and len(split_list(value)) not in (1, count):
                raise ValueError(f"{name} must have as many addresses as TRITON_GRPC_SERVICE")
        return self

    @model_validator(mode="after")
    def _check_issuer(self) -> Self:
        if self.jwks and not (self.jwt_issuer and self.jwt_audience):
            raise ValueError("LLM_JWKS needs LLM_JWT_ISSUER and LLM_JWT_AUDIENCE")
        if self.jwks and "://" in self.jwks and not self.jwks.lower().startswith("https://"):
            raise ValueError("LLM_JWKS must be a file or an https URL")
        return self

    @property
    def is_authenticated(self) -> bool:
        """Whether requests need a token."""
        if self.auth == "auto":
            return self.jwt_secret is not None or self.jwks is not None
        return self.auth == "on"

    @property
    def hosts_to_check(self) -> list[str] | None:
        """The names that Host and Origin may have; None if any Host may come."""
        is_chosen = "allowed_hosts" in self.model_fields_set
        return self.allowed_hosts if is_chosen or not self.is_authenticated else None

    def database_addresses(self) -> list[tuple[str, int]]:
        """Hosts and ports of PostgreSQL; a port is 5432 unless `LLM_DATABASE_URL` names one."""
        return [split_address(one, 5432) for one in split_list(self.database_host)]


def split_list(text: str) -> list[str]:
    """What stands between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def split_address(address: str, default_port: int) -> tuple[str, int]:
    """`host`, `host:port`, `[v6]:port` or any of them with `http://` before it, taken apart."""
    bare = address.split("://", 1)[-1].rstrip("/")
    host, separator, port = bare.rpartition(":")
    if separator and port.isdigit():
        return host.strip("[]"), int(port)
    return bare.strip("[]"), default_port
