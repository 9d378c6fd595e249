"""Vast.ai through its own CLI (`vastai`), of the environment that runs this.

The CLI exits with 0 also when a call failed, so its JSON is what counts. It gets its arguments on
standard input, because any user may read a process's arguments and `env` may hold a token. It finds
the API key by itself (VAST_API_KEY, or the file of `vastai set api-key`); we never see it.
"""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from nvidia_triton.definition import Definition

# Longer than the CLI's own limit of 120 s a try.
CALL_SECONDS = 300
_RUN_CLI = """
import json, sys
sys.argv[1:] = json.load(sys.stdin)
from vastai.cli.main import main
main()
"""
# As a shell takes it, from wherever make was called.
PROGRAM = shlex.quote(str(Path(__file__).absolute().parent / ".venv" / "bin" / "vastai"))
_KEY_REMEDY = (
    f"export VAST_API_KEY=..., or `{PROGRAM} set api-key ...` "
    "(keys: https://cloud.vast.ai/manage-keys/)."
)


class VastError(Exception):
    """Failure of a call to Vast.ai, with the remedy: one line."""


class MissingError(VastError):
    """There is no such offer or instance."""


@dataclass(frozen=True)
class Offer:
    """A machine that can be rented."""

    id: int
    gpu: str
    gpus: int
    gpu_ram_gb: float
    price: float  # $ an hour, with the disk
    reliability: float
    disk_gb: float
    place: str


@dataclass(frozen=True)
class Instance:
    """A machine that we rent."""

    id: int
    status: str  # running, loading, ... (https://docs.vast.ai/cli/reference/show-instance)
    message: str  # the machine's own message
    label: str
    gpu: str
    gpus: int
    price: float  # $ an hour
    image: str
    host: str  # of its ssh server; "" while it has none
    port: int


class Vast:
    """The calls; each raises VastError."""

    def __init__(self, retry: int) -> None:
        """`retry` is the number of tries of each call."""
        self._options = ["--raw", f"--retry={retry}"]

    def search(self, definition: Definition) -> list[Offer]:
        """The offers that fit the definition, its price included, the cheapest first."""
        query = f"{definition.search} disk_space>={definition.disk:g}".strip()
        if definition.max_price is not None:
            query += f" dph<={definition.max_price:g}"
        offers = self._offers(query, definition, default_filters=True)
        return [offer for offer in offers if _is_affordable(offer, definition)]

    def offer(self, offer_id: int, definition: Definition) -> Offer:
        """One offer, priced with the definition's disk."""
        query = f"id={offer_id} rentable=true"
        for offer in self._offers(query, definition, default_filters=False):
            if offer.id == offer_id:
                return offer
        raise MissingError(f"There is no offer {offer_id} (any more): make search-instance")

    def create(self, offer_id: int, definition: Definition) -> int:
        """Rent an offer; the id of the instance, which costs from now on."""
        values = {
            "--image": definition.image,
            "--disk": f"{definition.disk:g}",
            "--label": definition.label,
            "--jupyter-dir": definition.jupyter_dir,
            "--env": definition.env,
            "--onstart-cmd": definition.onstart,
        }
        flags = {
            "--ssh": definition.ssh,
            "--direct": definition.direct,
            "--jupyter": definition.jupyter,
            "--jupyter-lab": definition.jupyter_lab,
            "--lang-utf8": definition.lang_utf8,
            "--python-utf8": definition.python_utf8,
            "--force": definition.force,
            # Rather an error than a stopped instance, whose disk costs.
            "--cancel-unavail": True,
        }
        options = [f"{name}={value}" for name, value in values.items() if value]
        options += [name for name, is_set in flags.items() if is_set]
        # The CLI repeats a call whose answer was lost, and then gets the error that the offer is gone.
        doubt = "make show-instances shows whether an instance exists now."
        try:
            answer = self._call(["create", "instance", str(offer_id), *options])
        except VastError as error:
            raise VastError(f"Offer {offer_id} was not rented: {error} {doubt}") from error
        if not isinstance(answer, dict) or not isinstance(answer.get("new_contract"), int):
            raise VastError(f"Offer {offer_id} was not rented: {_reason(answer)}. {doubt}")
        return int(answer["new_contract"])

    def instance(self, contract_id: int) -> Instance:
        """One of our instances."""
        missing = f"You have no instance {contract_id}: make show-instances"
        try:
            row = self._call(["show", "instance", str(contract_id)])
        except MissingError as error:
            raise MissingError(missing) from error
        if isinstance(row, dict) and isinstance(row.get("instances"), dict):
            row = row["instances"]
        if not isinstance(row, dict) or "id" not in row:
            raise MissingError(missing)
        return _instance(row)

    def instances(self) -> list[Instance]:
        """All our instances."""
        rows = self._call(["show", "instances"])
        if isinstance(rows, dict):
            rows = rows.get("instances", [])
        return [_instance(row) for row in _rows(rows)]

    def destroy(self, contract_id: int) -> None:
        """End an instance and lose its disk."""
        # If --yes is missing it asks on its own, and prints "Aborted." with status 0; with --raw it
        # prints nothing.
        self._run(["destroy", "instance", "--yes", str(contract_id)])

    def _offers(self, query: str, definition: Definition, *, default_filters: bool) -> list[Offer]:
        options = [f"--storage={definition.disk:g}", "--order=dph_total"]
        if not default_filters:
            options.append("--no-default")
        rows = self._call(["search", "offers", query, *options])
        return sorted((_offer(row) for row in _rows(rows)), key=lambda offer: offer.price)

    def _call(self, arguments: list[str]) -> object:
        """The JSON that a command answers."""
        lines = self._run(arguments).splitlines()
        for line in lines:
            if line.startswith("Error:"):  # of a query; a 1 as JSON follows
                raise VastError(f"vastai {arguments[0]}: {clean(line)}")
        # Remarks may come first, such as the end of a session with two factors.
        while lines and not lines[0].startswith(("{", "[")):
            del lines[0]
        try:
            return json.loads("\n".join(lines))
        except ValueError as error:
            raise VastError(f"vastai {arguments[0]}: an answer that is not JSON.") from error

    def _run(self, arguments: list[str]) -> str:
        """Output of a command; raises VastError if it reports a failure on standard error."""
        if importlib.util.find_spec("vastai") is None:
            raise VastError("The vastai CLI is not installed: make .venv (in nvidia_triton)")
        if not has_key():
            raise VastError(f"There is no API key: {_KEY_REMEDY}")
        try:
            ended = subprocess.run(  # noqa: S603 - our own environment's Python
                [sys.executable, "-I", "-c", _RUN_CLI],
                input=json.dumps([*arguments, *self._options]),
                capture_output=True,
                text=True,
                timeout=CALL_SECONDS,
                check=False,
                env={**os.environ, "VASTAI_NO_UPDATE_CHECK": "1"},
            )
        except subprocess.TimeoutExpired as error:
            raise VastError(f"Vast.ai did not answer within {CALL_SECONDS} s.") from error
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        for line in lines:
            _raise_if_refused(line)
        if ended.returncode != 0:
            raise VastError(_crash(lines))
        return ended.stdout


def has_key() -> bool:
    """True if the CLI has a key to send: from the environment, or from one of its files.

    If it had none it would ask the network first, and might complain about that. The places are those
    of https://github.com/vast-ai/vast-cli (vastai/cli/util.py, and DIRS there).
    """
    if "VAST_API_KEY" in os.environ:
        return bool(os.environ["VAST_API_KEY"].strip())
    home = Path.home()
    config = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    folder = (config if config.is_absolute() else home / ".config") / "vastai"
    files = [folder / "vast_api_key", folder / "vast_tfa_key", home / ".vast_api_key"]
    return any(file.exists() for file in files)


def _raise_if_refused(line: str) -> None:
    """With --raw, the CLI reports a refused call as a JSON object on standard error."""
    try:
        reported = json.loads(line)
    except ValueError:
        return
    if not isinstance(reported, dict) or not reported.get("error"):
        return
    status, reason = reported.get("status_code"), _reason(reported)
    if status in (401, 403):
        raise VastError(f"Vast.ai refused the API key, or there is none ({reason}): {_KEY_REMEDY}")
    if status == 404:
        raise MissingError(reason)
    raise VastError(f"Vast.ai: {reason} (status {status})" if status else f"vastai: {reason}")


def _crash(lines: list[str]) -> str:
    """A traceback in one line. Not its text: an address in it may hold the API key."""
    kind = lines[-1].partition(":")[0].strip() if lines else "no reason given"
    if kind.endswith(("ConnectionError", "Timeout", "SSLError", "ProxyError")):
        return f"Vast.ai cannot be reached ({kind.rpartition('.')[2]}): check the network."
    return f"The vastai CLI failed: {clean(kind)}"


def _reason(answer: object) -> str:
    if isinstance(answer, dict):
        for name in ("msg", "error"):
            if isinstance(answer.get(name), str) and answer[name].strip():
                return clean(answer[name])
    return "no reason given"


def clean(text: str, limit: int = 200) -> str:
    """Text from elsewhere as one printable line."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def _is_affordable(offer: Offer, definition: Definition) -> bool:
    return definition.max_price is None or offer.price <= definition.max_price


def _rows(rows: object) -> list[dict[str, object]]:
    if not isinstance(rows, list):
        raise VastError("Vast.ai answered something else than a list.")
    return [row for row in rows if isinstance(row, dict)]


def _offer(row: dict[str, object]) -> Offer:
    return Offer(
        id=_int(row, "id"),
        gpu=_text(row, "gpu_name"),
        gpus=_int(row, "num_gpus"),
        gpu_ram_gb=_number(row, "gpu_ram") / 1000,
        price=_number(row, "dph_total"),
        reliability=_number(row, "reliability2") or _number(row, "reliability"),
        disk_gb=_number(row, "disk_space"),
        place=_text(row, "geolocation"),
    )


def _instance(row: dict[str, object]) -> Instance:
    host, port = _ssh_address(row)
    return Instance(
        id=_int(row, "id"),
        status=_text(row, "actual_status") or "being provisioned",
        message=_text(row, "status_msg"),
        label=_text(row, "label"),
        gpu=_text(row, "gpu_name"),
        gpus=_int(row, "num_gpus"),
        price=_number(row, "dph_total"),
        image=_text(row, "image_uuid"),
        host=host,
        port=port,
    )


def _ssh_address(row: dict[str, object]) -> tuple[str, int]:
    """Address of its ssh server: directly if it has a port of its own, else through the proxy.

    `vastai ssh-url` does the same, but caches the answer without a limit.
    """
    ports = row.get("ports")
    mapped = ports.get("22/tcp") if isinstance(ports, dict) else None
    if isinstance(mapped, list) and mapped and isinstance(mapped[0], dict):
        return _text(row, "public_ipaddr"), _int(mapped[0], "HostPort")
    is_jupyter = "jupyter" in _text(row, "image_runtype")
    return _text(row, "ssh_host"), _int(row, "ssh_port") + is_jupyter


def _text(row: dict[str, object], name: str) -> str:
    value = row.get(name)
    return clean(value) if isinstance(value, str) else ""


def _number(row: dict[str, object], name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0


def _int(row: dict[str, object], name: str) -> int:
    value = row.get(name)
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    return value if isinstance(value, int) else 0
