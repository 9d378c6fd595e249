"""Wire schemas of downloads of models."""

from collections.abc import Container
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from app.core.ids import created_at
from app.provisioning import patterns
from app.provisioning.catalogue import Revision
from app.provisioning.download_store import DownloadState, ModelDownload
from app.provisioning.profiles import Name

_NO_PROFILE = "the service does not have the profile any more: cancel the download"


def _hugging_face_id(text: str) -> str:
    if not patterns.is_model_id(text):
        raise ValueError("must be a Hugging Face id such as owner/name")
    return text


class ModelDownloadCreate(BaseModel):
    """A model to download into the cache of a profile's host."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str, AfterValidator(_hugging_face_id)]
    profile: Name | None = Field(None, description="Default: the default profile, or the first.")
    revision: Annotated[Revision, Field(description="Branch, tag or commit.")] = "main"


class ModelDownloadRead(BaseModel):
    """A download of a model."""

    id: UUID
    model: str
    revision: str
    profile: str
    state: DownloadState
    reason: str = Field(description="Why it waits or ended; for people.")
    attempt: int
    done_bytes: int = Field(description="Bytes of the model's files that the cache has.")
    total_bytes: int | None = Field(description="Null until the files are listed.")
    commit: str | None = Field(description="The complete snapshot's.")
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


def download_to_wire(download: ModelDownload, profiles: Container[str]) -> dict[str, Any]:
    """A download as JSON; `profiles` are those that the service has."""
    is_lost = download.ended_at is None and download.profile not in profiles
    return {
        "id": str(download.id),
        "model": download.model,
        "revision": download.revision,
        "profile": download.profile,
        "state": download.state,
        "reason": _NO_PROFILE if is_lost else download.reason,
        "attempt": download.attempt,
        "done_bytes": download.done_bytes,
        "total_bytes": download.total_bytes,
        "commit": download.commit,
        "created_at": created_at(download.id),
        "started_at": download.started_at,
        "ended_at": download.ended_at,
    }
