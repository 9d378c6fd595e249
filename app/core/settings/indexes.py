"""infini-gram indexes and attributions."""

from pathlib import Path

from pydantic import AliasChoices, Field

from app.core.settings.fields import Optional, Section


class IndexSettings(Section, title="infini-gram"):
    indexes_file: Optional[Path] = Field(
        None, validation_alias=AliasChoices("LLM_INDEXES_FILE", "INDEXES_FILE")
    )
    """TOML file that declares the infini-gram indexes to open ([infini_gram.md](infini_gram.md)).
    Unset: none."""
    index_threads: int = Field(4, ge=1, le=64)
    """Index queries that one process runs at the same time, one per thread."""
    index_queue: int = Field(64, ge=0, le=10_000)
    """Most index queries that wait for a thread; a further one returns 503."""
    attribution_seconds: float = Field(90.0, gt=0, le=3600)
    """Time limit of `POST /{index}/attribution`; after it the attribution is cancelled and the
    request returns 503."""
    attribution_cache_seconds: float = Field(3600.0, ge=0)
    """Time during which the same `POST /{index}/attribution` of a team returns the stored
    attribution; 0: no cache."""
    attribution_cache_hit_seconds: float = Field(43_200.0, ge=0)
    """Time for which a hit keeps it from then on."""
