"""Definition of the machine to rent and of Triton on it; make's variables override its keys.

Every value that reaches the vastai CLI, ssh, rsync or the instance is checked here against an
allow-list: none can be taken for an option or for a shell's syntax.
"""

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

# https://docs.vast.ai: longer start scripts are refused.
MAX_ONSTART_CHARACTERS = 4048

_NAME = r"[A-Za-z0-9_+-][A-Za-z0-9._+-]*"
_REMOTE_PATH = re.compile(rf"(?:/{_NAME})+")  # absolute; no part begins with a dot
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*(?:[._/:@]+[A-Za-z0-9_-]+)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,99}")
# Comparisons as `vastai search offers --help` describes them.
_SEARCH = re.compile(r'[a-z][A-Za-z0-9_.,<>=!" \[\]-]*')
_PROGRAM = re.compile(r"(?!-)[A-Za-z0-9._+-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# The CLI splits at spaces and strips quotes, and drops in silence what it does not understand.
_ENV_VALUE = re.compile(r"[!#-&(-~]*")
_ENV_OPTIONS = {
    "-p": re.compile(r"[0-9]{1,5}(?::[0-9]{1,5})?(?:/(?:tcp|udp))?"),
    "-h": re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*"),
    "-v": re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]*:(?:/[A-Za-z0-9_][A-Za-z0-9_.]*)+"),
}
# Never shown, not even when they are wrong.
_CONFIDENTIAL = ("env", "onstart")


class InputError(Exception):
    """A value that cannot be used: one line that names it and what it may be."""


@dataclass(frozen=True)
class Definition:
    """The checked values. Each field is a key of the file, `tag` is joined to `image`."""

    search: str  # comparisons for `vastai search offers`
    max_price: float | None  # $ an hour, disk included; None: any
    disk: float  # GB
    image: str
    label: str
    ssh: bool
    direct: bool
    jupyter: bool
    jupyter_dir: str
    jupyter_lab: bool
    lang_utf8: bool
    python_utf8: bool
    force: bool
    retry: int  # tries of each call to Vast.ai
    env: str  # as for `docker create`: "-e NAME=VALUE -p 80:80"
    onstart: str
    wait_minutes: float  # for the instance to run, and again for the models to be ready
    models: Path  # here
    model_dir: str  # on the instance
    tritonserver: str  # program on the instance
    triton_http_port: int  # on the instance
    triton_grpc_port: int
    triton_metrics_port: int
    tunnels_address: str  # the tunnels' ends here: an IPv4 address of this machine, and its ports
    http_port: int
    grpc_port: int
    metrics_port: int

    @property
    def http_address(self) -> str:
        """HOST:PORT of Triton's HTTP at the tunnel's end here."""
        return f"{self.tunnels_address}:{self.http_port}"

    @property
    def tunnels(self) -> dict[int, int]:
        """Port here to port on the instance: HTTP, gRPC, metrics."""
        return {
            self.http_port: self.triton_http_port,
            self.grpc_port: self.triton_grpc_port,
            self.metrics_port: self.triton_metrics_port,
        }


def read(
    path: Path, given: Mapping[str, str], environment: Mapping[str, str] = os.environ
) -> Definition:
    """The definition in `path`, with the values `given` by make over it, by their keys.

    `environment` supplies the values of `env`'s variables that have none. Raises InputError.
    """
    values = _Values({**_load(path), **given})
    values.refuse_unknown()
    definition = Definition(
        search=values.text("search", "", _SEARCH, "comparisons such as gpu_ram>=20"),
        max_price=values.number_or_none("max_price", 0.01, 1000),
        disk=values.number("disk", 40, 1, 100_000),
        image=_image(values),
        label=values.text("label", "tritonserver", _LABEL, "letters, digits, space and ._-"),
        ssh=values.flag("ssh", default=True),
        direct=values.flag("direct", default=True),
        jupyter=values.flag("jupyter", default=False),
        jupyter_dir=values.text("jupyter_dir", "", _REMOTE_PATH, "an absolute path, or empty"),
        jupyter_lab=values.flag("jupyter_lab", default=False),
        lang_utf8=values.flag("lang_utf8", default=True),
        python_utf8=values.flag("python_utf8", default=True),
        force=values.flag("force", default=False),
        retry=int(values.number("retry", 5, 1, 100, whole=True)),
        env=_env(values.raw("env", ""), environment),
        onstart=_onstart(values.raw("onstart", "")),
        wait_minutes=values.number("wait_minutes", 30, 0.01, 24 * 60),
        models=_folder(path, values.raw("models", "../models")),
        model_dir=values.path("model_dir", "/opt/tritonserver/models"),
        tritonserver=_program(values),
        triton_http_port=values.port("triton_http_port", 8000),
        triton_grpc_port=values.port("triton_grpc_port", 8001),
        triton_metrics_port=values.port("triton_metrics_port", 8002),
        tunnels_address=_address(values.raw("tunnels_address", "127.0.0.1")),
        http_port=values.port("http_port", 8000),
        grpc_port=values.port("grpc_port", 8001),
        metrics_port=values.port("metrics_port", 8002),
    )
    if re.search(r"\bdph", definition.search):
        raise InputError("search: the price belongs in max_price.")
    if len(definition.tunnels) < 3 or len(set(definition.tunnels.values())) < 3:
        raise InputError("http_port, grpc_port and metrics_port must be three ports, on each side.")
    return definition


def identifier(name: str, value: str | None, remedy: str) -> int:
    """The id of an offer or an instance; raises InputError with the remedy."""
    if value is None:
        raise InputError(f"{name} is missing: {remedy}")
    if not value:
        raise InputError(f"{name} is given but empty: {remedy}")
    if not re.fullmatch(r"[1-9][0-9]{0,17}", value):
        raise InputError(f"{name}: {_shown(value)} is not a number: {remedy}")
    return int(value)


class _Values:
    """Values by key, as YAML or make gave them; every method raises InputError."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def refuse_unknown(self) -> None:
        known = {field.name for field in fields(Definition)} | {"tag"}
        if unknown := sorted(set(self._values) - known):
            raise InputError(f"{_shown(unknown[0])} is no key of the definition.")

    def raw(self, name: str, default: str) -> str:
        value = self._values.get(name, default)
        if value is None:
            return ""
        if isinstance(value, (dict, list, bool)):
            raise _wrong(name, value, "a text")
        return str(value)

    def text(self, name: str, default: str, pattern: re.Pattern[str], what: str) -> str:
        value = self.raw(name, default)
        if isinstance(self._values.get(name), float):  # 26.10 would be 26.1
            raise InputError(f"{name}: must be in quotes.")
        if value and not pattern.fullmatch(value):
            raise _wrong(name, value, what)
        return value

    def path(self, name: str, default: str) -> str:
        return self.text(name, default, _REMOTE_PATH, "an absolute path without ..") or default

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._values.get(name, default)
        known = {"true": True, "false": False, "": False}
        text = str(value).lower()
        if text not in known:
            raise _wrong(name, value, "true or false")
        return known[text]

    def number(
        self, name: str, default: float, low: float, high: float, *, whole: bool = False
    ) -> float:
        text = self.raw(name, str(default))
        pattern = r"[0-9]{1,9}" if whole else r"[0-9]{1,9}(?:\.[0-9]{1,9})?"
        number = float(text) if re.fullmatch(pattern, text) else -1.0
        if not low <= number <= high:
            raise _wrong(name, text, f"a {'whole ' * whole}number from {low} to {high}")
        return number

    def number_or_none(self, name: str, low: float, high: float) -> float | None:
        return self.number(name, low, low, high) if self.raw(name, "") else None

    def port(self, name: str, default: int) -> int:
        return int(self.number(name, default, 1, 65535, whole=True))


def _load(path: Path) -> dict[str, object]:
    try:
        loaded = yaml.safe_load(path.read_text())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise InputError(f"{path}: not YAML{line}.") from error
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise InputError(f"{path}: must be `key: value` lines.")
    return loaded


def _image(values: _Values) -> str:
    image = values.text("image", "", _IMAGE, "the name of a container image")
    tag = values.text("tag", "", _TAG, "the tag of an image")
    if not image:
        raise InputError("image: is missing.")
    own = re.search(r"[:@]([^/]+)$", image)
    if own is None:
        return f"{image}:{tag}" if tag else image
    if tag and own[1] != tag:
        raise InputError(f"tag: {_shown(tag)} is not the tag that image has, {_shown(own[1])}.")
    return image


def _address(text: str) -> str:
    """An address to listen on, for clients to connect to: 0.0.0.0 is none."""
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        raise _wrong("tunnels_address", text, "an IPv4 address of this machine") from None
    if address.is_unspecified or address.is_global:
        raise _wrong("tunnels_address", text, "a private address of this machine")
    return str(address)


def _program(values: _Values) -> str:
    name = values.raw("tritonserver", "tritonserver")
    if not (_PROGRAM.fullmatch(name) or _REMOTE_PATH.fullmatch(name)):
        raise _wrong("tritonserver", name, "the name of a program, or its absolute path")
    return name


def _folder(definition: Path, text: str) -> Path:
    """A folder here; a relative path begins at the definition's folder."""
    if not text or "\0" in text:
        raise _wrong("models", text, "a folder")
    return Path(os.path.normpath(definition.absolute().parent / Path(text).expanduser()))


def _onstart(text: str) -> str:
    # A shell script, which the instance runs: only its size can be wrong.
    if len(text) > MAX_ONSTART_CHARACTERS or "\0" in text:
        raise InputError(f"onstart: at most {MAX_ONSTART_CHARACTERS} characters.")
    return text.strip()


def _env(text: str, environment: Mapping[str, str]) -> str:
    """`env` with every value filled in: `-e NAME` takes it from our environment, as docker does."""
    words, filled = text.split(" "), []
    words = [word for word in words if word]
    if len(words) % 2:
        raise InputError("env: must be pairs such as `-e NAME=VALUE -e NAME -p 80:80`.")
    for option, value in zip(words[::2], words[1::2], strict=True):
        if option == "-e":
            filled += [option, _variable(value, environment)]
        elif option in _ENV_OPTIONS and _ENV_OPTIONS[option].fullmatch(value):
            filled += [option, value]
        else:
            raise InputError("env: only -e, -p, -h and -v, each with its value.")
    return " ".join(filled)


def _variable(assignment: str, environment: Mapping[str, str]) -> str:
    name, separator, value = assignment.partition("=")
    if not _VARIABLE.fullmatch(name):
        raise InputError("env: after -e comes the name of a variable.")
    if not separator:
        if name not in environment:
            raise InputError(f"env: {name} is not set in your environment: export {name}=...")
        value = environment[name]
    if not _ENV_VALUE.fullmatch(value):
        raise InputError(f"env: the value of {name} must be ASCII without spaces and quotes.")
    return f"{name}={value}"


def _wrong(name: str, value: object, what: str) -> InputError:
    shown = "" if name in _CONFIDENTIAL else f"{_shown(value)} is not "
    return InputError(f"{name}: {shown}{what}.")


def _shown(value: object) -> str:
    """A value as one printable line."""
    text = ascii(str(value))
    return text if len(text) <= 60 else f"{text[:57]}...'"
