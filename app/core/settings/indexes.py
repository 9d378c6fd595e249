"""infini-gram indexes and attributions."""

from pathlib import Path

from pydantic import AliasChoices, Field

from app.core.settings.fields import Optional, Section


class IndexSettings(Section, title="infini-gram"):
    indexes_file: Optional[Path] = Field(
        None,
        alias="LLM_INDEXES_FILE",
        validation_alias=AliasChoices("LLM_INDEXES_FILE", "INDEXES_FILE"),
        description="TOML file that declares the infini-gram indexes to open "
        "([infini_gram.md](infini_gram.md)). Unset: none.",
    )
    index_threads: int = Field(
        4,
        alias="LLM_INDEX_THREADS",
        ge=1,
        le=64,
        description="Index queries that one process runs at the same time, one per thread.",
    )
    index_queue: int = Field(
        64,
        alias="LLM_INDEX_QUEUE",
        ge=0,
        le=10_000,
        description="Most index queries that wait for a thread; a further one returns 503.",
    )

    attribution_seconds: float = Field(
        90.0,
        alias="LLM_ATTRIBUTION_SECONDS",
        gt=0,
        le=3600,
        description="Time limit of `POST /{index}/attribution`; after it the attribution is cancelled "
        "and the request returns 503.",
    )
    attribution_cache_seconds: float = Field(
        3600.0,
        alias="LLM_ATTRIBUTION_CACHE_SECONDS",
        ge=0,
        description="Time during which the same `POST /{index}/attribution` of a team returns the "
        "stored attribution; 0: no cache.",
    )
    attribution_cache_hit_seconds: float = Field(
        43_200.0,
        alias="LLM_ATTRIBUTION_CACHE_HIT_SECONDS",
        ge=0,
        description="Time for which a hit keeps it from then on.",
    )
