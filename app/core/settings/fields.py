"""Types of settings, and the parts of addresses and lists."""

import re
from typing import Annotated, TypeVar

from pydantic import BeforeValidator, Field
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

DEFAULT_TEAM = "default"
# Neither a shell, nor Triton's options, nor a list between commas gives these characters a meaning.
TRITON_SECRET = re.compile(r"[A-Za-z0-9_-]{8,256}")
# A shorter retention could delete a result before its client reads it.
MIN_RETAIN_SECONDS = 60.0
MAX_RETAIN_SECONDS = 3_153_600_000.0  # a hundred years


def _split_at_commas(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


# The environment holds it as text between commas, not as JSON.
Names = Annotated[list[str], NoDecode, BeforeValidator(_split_at_commas)]


def _none_if_empty(value: object) -> object:
    return None if value == "" else value


# A variable that is set to nothing is not set: environment files have such lines.
_T = TypeVar("_T")
Optional = Annotated[_T | None, BeforeValidator(_none_if_empty)]
RetentionSeconds = Optional[Annotated[float, Field(ge=MIN_RETAIN_SECONDS, le=MAX_RETAIN_SECONDS)]]


class Section(BaseSettings):
    """One section of the settings; its title is that of its table in `docs/settings.md`.

    A field's variable is LLM_ and its name, unless it has an alias; its docstring is its meaning there.
    """

    model_config = SettingsConfigDict(
        alias_generator=lambda name: f"LLM_{name.upper()}",
        use_attribute_docstrings=True,
        populate_by_name=True,
        extra="ignore",
        hide_input_in_errors=True,  # an invalid value may be a secret
    )


def split_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def split_address(address: str, default_port: int) -> tuple[str, int]:
    """Host and port of `host`, `host:port` or `[v6]:port`, also after `http://`."""
    bare = address.split("://", 1)[-1].rstrip("/")
    host, separator, port = bare.rpartition(":")
    if separator and port.isdigit():
        return host.strip("[]"), int(port)
    return bare.strip("[]"), default_port
