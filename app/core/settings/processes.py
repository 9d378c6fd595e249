"""Workers and the loops that run beside them."""

from pathlib import Path
from urllib.parse import urlsplit

from pydantic import AliasChoices, Field, SecretStr, field_validator

from app.core.settings.fields import Optional, Section

HUGGING_FACE = "https://huggingface.co"


class WorkerSettings(Section, title="Worker"):
    worker_slots: int = Field(256, ge=1, le=10_000)
    """Results that one worker process runs at the same time on each Triton server."""
    worker_memory_bytes: Optional[int] = Field(None, ge=1)
    """Bytes that the running results of a worker may take: prompts, texts of `max_tokens`, log
    probabilities. It claims no further result once they are taken, so one may exceed them. Unset:
    half of the memory that its container or machine has available at the start."""
    lease_seconds: float = Field(15.0, ge=1, le=600)
    """Time without a heartbeat after which other processes rescue a worker's results. The worker
    renews its lease at each fifth of it and fences itself at two thirds."""
    poll_seconds: float = Field(1.0, gt=0, le=60)
    """Interval at which a worker with free slots polls the queue if no notification arrives."""
    flush_seconds: float = Field(0.5, gt=0, le=10)
    """Interval at which a worker writes the text of its running results to the database."""
    shutdown_grace_seconds: float = Field(
        30.0,
        validation_alias=AliasChoices("LLM_SHUTDOWN_GRACE_SECONDS", "LLM_GRACE_SECONDS"),
        ge=0,
        le=600,
    )
    """Time that a stopping worker gives its results to finish before it returns them to the
    queue."""


class BatchSettings(Section, title="Batches"):
    max_batch_lines: int = Field(50_000, ge=1, le=200_000)
    """Most requests of one batch."""
    team_max_batches: int = Field(100, ge=0, le=100_000)
    """Most unfinished batches of one team; a further one returns 429. 0: no limit."""
    batch_in_flight: int = Field(500, ge=1, le=100_000)
    """Most requests of one batch that are queued or running at the same time."""


class JobSettings(Section, title="Jobs"):
    max_job_rows: int = Field(10_000_000, ge=1)
    """Most rows of a job that is created from then on; a further one returns 429."""
    team_max_jobs: int = Field(1_000, ge=0, le=1_000_000)
    """Most jobs of one team that have not ended; a further one returns 429. 0: no limit."""


class WebhookSettings(Section, title="Webhooks"):
    webhook_timeout_seconds: float = Field(15.0, gt=0, le=300)
    """Time limit of one webhook call, from name resolution to the status."""
    webhook_rotation_seconds: float = Field(86_400.0, ge=0)
    """Time after a rotation during which webhooks are also signed with the previous secret."""
    webhook_allow_private: bool = False
    """Permit webhooks to loopback, private and link-local addresses (development, or receivers in
    your own network). Each client can then reach the addresses that the worker can reach."""


class LaunchSettings(Section, title="Launches"):
    profiles_file: Optional[Path] = None
    """TOML file of the profiles that can launch Triton servers ([launches.md](launches.md)); API
    and workers read the same file. Unset: none."""
    catalogue_file: Optional[Path] = None
    """TOML file of the models offered for launching, read at each request. Unset: none."""
    launch_poll_seconds: float = Field(10.0, gt=0, le=600)
    """Interval at which a launch's job, server and use are checked. Downloads that are due are claimed as often, and each 15 s at least."""
    launch_lease_seconds: float = Field(60.0, ge=3, le=3600)
    """Time limit of one such check; after it another worker takes the launch. Also the lease of a download."""
    launch_drain_seconds: float = Field(60.0, ge=0, le=86_400)
    """Time that running results have to finish when their launch is stopped."""


class DownloadSettings(Section, title="Downloads of models"):
    hub_endpoint: str = Field(HUGGING_FACE, alias="HF_ENDPOINT")
    """Hub that models are downloaded from; the profile's host has to reach it. Tokens are sent over
    https only, or to loopback."""
    hugging_face_token_file: Optional[Path] = None
    """File of the sealed token for downloads, which `launch token set` writes
    ([launches.md](launches.md#the-token)). Unset: downloads send no token."""
    seal_secret: Optional[SecretStr] = None
    """Secret that seals the stored token; 32 random bytes or more (`openssl rand -base64 32`), kept
    apart from the file."""

    @field_validator("hub_endpoint")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        value = value or HUGGING_FACE  # a line of an environment file that sets it to nothing
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ValueError("must be an http or https URL without a name and password")
        return value.rstrip("/")
