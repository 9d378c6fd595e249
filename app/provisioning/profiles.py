"""Profiles: where servers can be launched, written by the operator in one TOML file.

    [profiles.della]
    provider = "slurm"
    host = "della.example.org"            # without it sbatch runs where the worker does
    user = "llm"
    home = "/scratch/llm/home"             # a directory of its own per launch, gone with the launch
    cache = "/scratch/llm/huggingface"
    model_roots = ["/scratch/models"]
    partition = "gpu"
    runtime = "apptainer"
    image = "/scratch/llm/triton.sif"

    [[profiles.della.tiers]]
    name = "small"
    max_model_size_gb = 32
    gpus = 1
    cpus = 6
    memory_gb = 48

docs/launches.md lists all members.
"""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from app.inference.engine_options import MAX_OPTIONS, engine_options
from app.provisioning import patterns
from app.provisioning.sizing.resources import MAX_NODES

Provider = Literal["slurm", "local"]
_T = TypeVar("_T", bound=BaseModel)


class ProfileError(Exception):
    """The file of profiles, or of the catalogue, is wrong; the message is one line that names the place."""


def _plain(text: str) -> str:
    if not patterns.is_plain_path(text):
        raise ValueError("must be an absolute path of letters, digits and ._+@-, without detours")
    return text


def _guarded(text: str) -> str:
    option = engine_options().get(text)
    if option is None or option.access == "never" or option.reason is None:
        raise ValueError("must be an option of vLLM's engine that needs a permission")
    return text


GuardedOption = Annotated[str, AfterValidator(_guarded)]
Name = Annotated[str, StringConstraints(pattern=patterns.NAME)]
PlainPath = Annotated[str, AfterValidator(_plain)]
Address = Annotated[str, StringConstraints(pattern=patterns.ADDRESS)]


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Tier(Table):
    """Resources of one size. If `max_model_size_gb` (10^9 bytes) is absent, it takes any model."""

    name: Name
    description: Annotated[str, Field(max_length=200)] = ""
    max_model_size_gb: Annotated[float, Field(gt=0)] | None = None
    gpus: Annotated[int, Field(ge=0, le=64)] = 0
    cpus: Annotated[int, Field(ge=1, le=1024)] = 4
    memory_gb: Annotated[int, Field(ge=1, le=16_384)] = 16  # host memory, Slurm's G
    gres: Annotated[str, StringConstraints(pattern=patterns.GRES)] | None = None
    constraint: Name | None = None
    partition: Name | None = None


class Profile(Table):
    """One place to launch servers at. If `host` is absent, commands run on the worker's machine."""

    name: Name
    provider: Provider
    default: bool = False
    # --- access to the place
    host: Annotated[str, StringConstraints(pattern=patterns.HOST)] | None = None
    ssh_port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    user: Annotated[str, StringConstraints(pattern=patterns.USER)] | None = None
    identity_file: PlainPath | None = None
    known_hosts: PlainPath | None = None
    # --- its files
    home: PlainPath
    cache: PlainPath | None = None
    python: PlainPath | None = None  # of the host, for downloads; see model_download
    model_roots: tuple[PlainPath, ...] = ()
    # --- Slurm's options, unless a request has others
    partition: Name | None = None
    account: Name | None = None
    constraint: Name | None = None
    modules: tuple[Annotated[str, StringConstraints(pattern=patterns.MODULE)], ...] = ()
    default_minutes: Annotated[int, Field(ge=1)] = 60
    max_minutes: Annotated[int, Field(ge=1, le=525_600)] = 1440
    max_nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] = MAX_NODES
    tiers: Annotated[tuple[Tier, ...], Field(min_length=1)] = (Tier(name="default"),)
    # --- Triton's runtime
    runtime: Literal["apptainer", "plain", "embedded"]
    image: PlainPath | None = None  # apptainer
    command: tuple[Annotated[str, Field(min_length=1, max_length=1024)], ...] = ("tritonserver",)
    venv: PlainPath | None = None  # embedded
    triton: PlainPath | None = None  # embedded: this repository's folder of that name
    supervise: bool | None = None  # restart a dead server in its job; see is_supervised
    # --- models
    trust_remote_code: bool = False
    triton_entries: bool = False
    engine_options: Annotated[tuple[GuardedOption, ...], Field(max_length=MAX_OPTIONS)] = ()
    offline: bool = True
    # --- the server
    listen: Address = "127.0.0.1"
    tunnel_listen: Address = "127.0.0.1"
    slots: Annotated[int, Field(ge=1, le=10_000)] | None = None
    start_minutes: Annotated[float, Field(gt=0, le=1440)] = 30
    idle_minutes: Annotated[float, Field(ge=0, le=100_000)] = 30

    @property
    def is_supervised(self) -> bool:
        """Jobs run Triton under triton/health, which needs Python 3.9 in Triton's environment."""
        return self.runtime != "plain" if self.supervise is None else self.supervise

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.provider == "local" and self.host is not None:
            raise ValueError("provider local runs on this machine: it has no host")
        needed: dict[str, tuple[str, ...]] = {
            "apptainer": ("image",),
            "embedded": ("venv", "triton"),
        }
        for member in needed.get(self.runtime, ()):
            if getattr(self, member) is None:
                raise ValueError(f"runtime {self.runtime} needs {member}")
        if any("\x00" in word or "\n" in word for word in self.command):
            raise ValueError("command: a word holds a NUL or a line break")
        if self.default_minutes > self.max_minutes:
            raise ValueError("default_minutes exceeds max_minutes")
        names = [tier.name for tier in self.tiers]
        if len(set(names)) < len(names):
            raise ValueError("two tiers have one name")
        return self

    def tier(self, name: str) -> Tier | None:
        return next((tier for tier in self.tiers if tier.name == name), None)


def read_profiles(file: Path | None) -> dict[str, Profile]:
    """The profiles of the file, by name; none without a file. Raises ProfileError."""
    if file is None:
        return {}
    tables = read_tables(file, "profiles")
    profiles = {
        name: validate_table(Profile, file, f"profiles.{name}", table, name)
        for name, table in tables.items()
    }
    for provider in ("slurm", "local"):
        defaults = [
            one.name for one in profiles.values() if one.provider == provider and one.default
        ]
        if len(defaults) > 1:
            raise ProfileError(
                f"{file}: profiles.{defaults[1]}.default: {defaults[0]} is it already"
            )
    return profiles


def find_profile(
    profiles: dict[str, Profile], name: str | None, provider: Provider | None
) -> Profile | None:
    if name is not None:
        return profiles.get(name)
    fitting = [one for one in profiles.values() if provider in (None, one.provider)]
    return next((one for one in fitting if one.default), fitting[0] if fitting else None)


def no_such_profile(profiles: dict[str, Profile]) -> str:
    """The message for a request whose profile there is not."""
    known = ", ".join(profiles) or "none: the operator writes them (LLM_PROFILES_FILE)"
    return f"there is no such profile; there are {known}"


def read_tables(file: Path, name: str) -> dict[str, Any]:
    """The tables below one name, which must be all of the file. Raises ProfileError."""
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"{file} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ProfileError(f"{file}: {error}") from error
    if unknown := sorted(set(document) - {name}):
        raise ProfileError(f"{file}: {unknown[0]!r} is unknown: write [{name}.NAME]")
    tables = document.get(name, {})
    if not isinstance(tables, dict) or not all(isinstance(one, dict) for one in tables.values()):
        raise ProfileError(f"{file}: {name}: must be tables such as [{name}.NAME]")
    return tables


def validate_table(kind: type[_T], file: Path, place: str, table: dict[str, Any], name: str) -> _T:
    """One table as its type. Raises ProfileError that names the first wrong member."""
    if "name" in table:
        raise ProfileError(f"{file}: {place}.name: unknown; the table's name is it")
    try:
        # TOML's arrays are lists; the type defines all others.
        return kind.model_validate(_frozen(table) | {"name": name})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in (place, *first["loc"]))
        text = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            text = f"unknown; there are {', '.join(sorted(set(kind.model_fields) - {'name'}))}"
        raise ProfileError(f"{file}: {where}: {text}") from None


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(member) for key, member in value.items()}
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
