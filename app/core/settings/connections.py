"""PostgreSQL and Triton: addresses, pools and time-outs."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from app.core.settings.fields import (
    TRITON_SECRET,
    Names,
    Optional,
    Section,
    split_address,
    split_list,
)


class DatabaseSettings(Section, title="Database"):
    database_host: str = Field(alias="LLM_DATABASE_URL", min_length=1)
    """PostgreSQL server, as `host` or `host:port`. A comma-separated list names a primary and its
    standbys; the service uses the one that accepts writes. See docs/failover.md."""
    database_listener: Optional[str] = Field(None, alias="LLM_DATABASE_LISTENER_URL")
    """PostgreSQL's own address, written as LLM_DATABASE_URL, where that is a PgBouncer that pools
    transactions. Listeners, heartbeats, migrations and `doctor` connect to it directly. Unset:
    LLM_DATABASE_URL is PostgreSQL. See docs/scaling.md#connections-and-pgbouncer."""
    database_user: str = Field(alias="LLM_DATABASE_ADMIN_USER", min_length=1)
    """PostgreSQL role."""
    database_password: SecretStr
    """Password of the role."""
    database_name: str = Field(alias="LLM_DATABASE_DB", min_length=1)
    """Database name."""
    database_pool_size: int = Field(8, ge=2, le=200)
    """Most PostgreSQL connections in the pool of one process; its listener and heartbeat have their
    own."""
    database_timeout_seconds: float = Field(10.0, gt=0, le=300)
    """How long a request waits for an unavailable database before it returns 503."""
    slow_statement_seconds: float = Field(0.5, gt=0)
    """A statement that takes longer is logged (`slow_statement`) with PostgreSQL's plan of it, at
    most every ten minutes."""

    @field_validator("database_host", "database_listener")
    @classmethod
    def _names_a_server(cls, text: str | None) -> str | None:
        if text is not None and not split_list(text):
            raise ValueError("it names no server")
        return text

    def database_addresses(self) -> list[tuple[str, int]]:
        """Hosts and ports of PostgreSQL; a port is 5432 unless `LLM_DATABASE_URL` names one."""
        return [split_address(one, 5432) for one in split_list(self.database_host)]

    def direct_addresses(self) -> list[tuple[str, int]]:
        """Hosts and ports of PostgreSQL itself, past a PgBouncer."""
        names = self.database_listener or self.database_host
        return [split_address(one, 5432) for one in split_list(names)]

    @property
    def has_pooler(self) -> bool:
        """True if LLM_DATABASE_URL is a PgBouncer that pools transactions."""
        return self.database_listener is not None


class TritonSettings(Section, title="Triton"):
    triton_grpc: str = Field("127.0.0.1:8001", alias="TRITON_GRPC_SERVICE")
    """Triton's gRPC address, `host:port`. Servers of a comma-separated list share the results of
    the models that each serves. Empty: all servers are registered or launched. See
    docs/servers.md."""
    triton_http: str = Field("127.0.0.1:8000", alias="TRITON_HTTP_SERVICE")
    """Triton's HTTP address, `host:port`; as many as gRPC addresses, or empty. Only shown by `GET
    /servers`; the service uses gRPC."""
    triton_metrics: str = Field("127.0.0.1:8002", alias="TRITON_METRICS_SERVICE")
    """Triton's metrics address, `host:port`; as many as gRPC addresses. Only shown by `GET
    /servers`."""
    triton_secret: Optional[SecretStr] = None
    """Secret that every request to these servers carries; as many as gRPC addresses, or one for
    all. Unset: none. See docs/servers.md#the-secret-of-a-server."""
    triton_refresh_seconds: float = Field(2.0, gt=0, le=60)
    """Interval at which each process asks Triton which models are ready."""
    engine_silence_seconds: float = Field(30.0, ge=1, le=3600)
    """Longest silence of a model on one server: no token for any of its results, and no answer to a
    probe of one token. After it the engine counts as dead and its results run elsewhere. Raise it
    where an engine needs longer to read one prompt."""
    model_repository: Path = Path("models")
    """Triton model repository from which tokenizers and chat templates are read."""
    more_model_repositories: Names = Field([])
    """Comma-separated further repositories, for models that LLM_MODEL_REPOSITORY lacks."""
    default_model: Optional[Annotated[str, Field(max_length=256)]] = None
    """Model of requests that name none (TGI and `/inference`). Unset: the only ready model."""

    @model_validator(mode="after")
    def _check_triton(self) -> Self:
        count = len(split_list(self.triton_grpc))
        for name, value in (
            ("TRITON_HTTP_SERVICE", self.triton_http),
            ("TRITON_METRICS_SERVICE", self.triton_metrics),
        ):
            if count > 1 and value and len(split_list(value)) not in (1, count):
                raise ValueError(f"{name} must have as many addresses as TRITON_GRPC_SERVICE")
        secrets = self.triton_secrets()
        if len(secrets) != count:
            raise ValueError("LLM_TRITON_SECRET must have one secret, or as many as servers")
        if not all(one is None or TRITON_SECRET.fullmatch(one) for one in secrets):
            raise ValueError(f"LLM_TRITON_SECRET: each secret must match {TRITON_SECRET.pattern}")
        return self

    def model_repositories(self) -> list[Path]:
        """All model repositories, in the order in which a model is looked for."""
        return [self.model_repository, *(Path(one) for one in self.more_model_repositories if one)]

    def triton_secrets(self) -> list[str | None]:
        """The secret of each server that `triton_grpc` names."""
        count = len(split_list(self.triton_grpc))
        secrets = split_list(self.triton_secret.get_secret_value()) if self.triton_secret else []
        return [*secrets] if len(secrets) > 1 else [secrets[0] if secrets else None] * count
