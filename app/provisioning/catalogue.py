"""The catalogue: models that an operator offers for launching, for users who choose from a list.

    [models."Qwen/Qwen2.5-7B-Instruct"]
    revision = "a09a35458c702b33eeacc393d103063234e8bc28"
    description = "General chat, 7B"
    size_gb = 15.2
    profile = "della"                     # the default for requests without a profile
    path = "/scratch/models/qwen2.5-7b"   # weights on the host, under a model root

The file may lie on a path that several services share; each request reads it again.
"""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from app.provisioning import patterns
from app.provisioning.profiles import Name, PlainPath, Table, read_tables, validate_table


def _model(text: str) -> str:
    if not (patterns.is_model_id(text) or patterns.is_plain_path(text)):
        raise ValueError("must be a Hugging Face id such as owner/name, or an absolute path")
    return text


def _revision(text: str) -> str:
    if not patterns.is_revision(text):
        raise ValueError("must be a branch, a tag or a commit")
    return text


ModelName = Annotated[str, AfterValidator(_model)]
Revision = Annotated[str, AfterValidator(_revision)]


class CatalogueEntry(Table):
    """One model on offer. `size_gb`: of its weights, 10^9 bytes."""

    name: ModelName
    revision: Revision | None = None
    description: Annotated[str, Field(max_length=1000)] = ""
    size_gb: Annotated[float, Field(gt=0)] | None = None
    profile: Name | None = None
    tier: Name | None = None
    path: PlainPath | None = None


def read_catalogue(file: Path | None) -> dict[str, CatalogueEntry]:
    """The models on offer, by name; none without a file. Raises ProfileError."""
    if file is None:
        return {}
    return {
        name: validate_table(CatalogueEntry, file, f"models.{name}", table, name)
        for name, table in read_tables(file, "models").items()
    }
