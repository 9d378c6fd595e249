"""The commands behind nvidia_triton/Makefile: `python -m nvidia_triton COMMAND`.

Their values come from the environment, where make puts its variables. It passes the names of those on
its command line: in `DEFINITION_KEYS` the keys of the definition, in `TOLD` the others that are
`KNOWN`, in `UNKNOWN` the rest. PRIVATE_SSH_KEY, DEFINITION, STATE_DIR and LOG_LINES also count when they
were only exported; ids and CONFIRM do not. Results go to standard output, all else to standard error.
"""

import difflib
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from nvidia_triton import server
from nvidia_triton.definition import Definition, InputError, identifier, read
from nvidia_triton.here import check_port, find_key, models_in
from nvidia_triton.instance import (
    KeyRefusedError,
    Remote,
    RemoteError,
    UnreachableError,
    close_tunnels,
    tunnels_are_open,
)
from nvidia_triton.progress import Wait, say
from nvidia_triton.server import ServerError
from nvidia_triton.vast import Instance, MissingError, Vast, VastError, clean

_HERE = Path(__file__).absolute().parent
# An instance that runs may not have our key yet.
KEY_SECONDS = 120
DESTROY_MINUTES = 1.0
MAX_OFFERS = 20


class Commands:
    """One method per command; each raises an error that is one line."""

    def __init__(self) -> None:
        _refuse_unknown()
        given = {
            name.lower(): os.environ.get(name, "")
            for name in os.environ.get("DEFINITION_KEYS", "").split()
        }
        self.definition: Definition = read(
            _path("DEFINITION") or _HERE / "vastai_instance_definition.yaml", given
        )
        self.vast = Vast(self.definition.retry)

    # --- Instances ---

    def search_instance(self) -> None:
        """List what could be rented, the cheapest first."""
        offers = self.vast.search(self.definition)
        if not offers:
            raise VastError("There is no such offer now: ask for less in SEARCH=, or MAX_PRICE=.")
        rows = [("INSTANCE_ID", "$/hour", "GPU", "RAM", "disk", "reliable", "where")]
        rows += [
            (
                str(offer.id),
                f"{offer.price:.3f}",
                f"{offer.gpus} x {offer.gpu}",
                f"{offer.gpu_ram_gb:.0f} GB",
                f"{offer.disk_gb:.0f} GB",
                f"{100 * offer.reliability:.1f} %",
                offer.place,
            )
            for offer in offers[:MAX_OFFERS]
        ]
        _print_table(rows)
        if len(offers) > MAX_OFFERS:
            say(f"... and {len(offers) - MAX_OFFERS} that cost more")

    def create_instance(self) -> None:
        """Rent the offer INSTANCE_ID; prints the instance's id."""
        print(self._create(self._offer_id()))

    def show_instances(self) -> None:
        """List our instances."""
        instances = self.vast.instances()
        if not instances:
            say("You have no instances.")
            return
        rows = [("CONTRACT_ID", "status", "$/hour", "GPU", "label", "image", "ssh")]
        rows += [
            (
                str(found.id),
                found.status,
                f"{found.price:.3f}",
                f"{found.gpus} x {found.gpu}",
                found.label,
                found.image,
                f"{found.host}:{found.port}" if found.host else "",
            )
            for found in instances
        ]
        _print_table(rows)

    def ssh_instance(self) -> None:
        """Log in."""
        self._remote().log_in()

    def destroy_instance(self) -> None:
        """End the instance for good, having asked."""
        found = self.vast.instance(self._contract_id())
        described = f"{found.id} ({found.label}, {found.gpus} x {found.gpu}, {found.status})"
        if _given("CONFIRM") != "1" and not is_confirmed(
            f"Destroy instance {described} and all its data? [y/N] "
        ):
            raise InputError(f"Instance {found.id} was not destroyed.")
        self.vast.destroy(found.id)
        wait = Wait(DESTROY_MINUTES)
        while self._exists(found.id):
            if not wait.goes_on(f"Instance {found.id} is being destroyed"):
                raise VastError(f"Instance {found.id} is still there: make show-instances")
        close_tunnels(_state(found.id))
        shutil.rmtree(_state(found.id), ignore_errors=True)
        say(f"Instance {found.id} is destroyed.")

    # --- Triton ---

    def run_tritonserver(self) -> None:
        """Start Triton on the instance."""
        self._remote().start_triton(self.definition)

    def kill_tritonserver(self) -> None:
        """End Triton on the instance."""
        self._remote().stop_triton(self.definition)

    def deploy_tritonserver(self) -> None:
        """Start Triton and show its log."""
        lines = _log_lines()
        remote = self._remote()
        remote.start_triton(self.definition)
        _print_log(remote, self.definition, lines)

    def deploy_models_tritonserver(self) -> None:
        """Bring the models to the instance."""
        self._deploy(self._remote())

    def ssh_tunnels_tritonserver(self) -> None:
        """Open the tunnels; prints the service's settings."""
        self._remote().open_tunnels(self.definition)
        print(settings_line(self.definition))

    def close_tunnels_tritonserver(self) -> None:
        """Close the tunnels."""
        contract_id = self._contract_id()
        was_open = close_tunnels(_state(contract_id))
        say(
            f"The tunnels to instance {contract_id} {'are closed' if was_open else 'were not open'}."
        )

    def check_health_tritonserver(self) -> None:
        """Print 1 if Triton and all its models are ready, else 0."""
        print(int(server.is_ready(self.definition.http_address)))

    def check_logs_tritonserver(self) -> None:
        """Print Triton's log."""
        lines = _log_lines()
        _print_log(self._remote(), self.definition, lines)

    def check_model_stats_tritonserver(self) -> None:
        """Print Triton's statistics."""
        print(server.statistics(self.definition.http_address))

    # --- All of it ---

    def bring_up(self) -> None:
        """From nothing, or from instance CONTRACT_ID, to ready models; prints the settings."""
        # Before anything costs: what would fail later anyway.
        contract = None if _given("CONTRACT_ID") is None else self._contract_id()
        offer = None if _given("INSTANCE_ID") is None else self._offer_id()
        if contract is None and offer is None:
            _refuse_exported_ids()
        key = find_key(_path("PRIVATE_SSH_KEY"))
        models_in(self.definition.models)
        if contract is None or not tunnels_are_open(_state(contract)):
            for port in self.definition.tunnels:
                check_port(self.definition.tunnels_address, port)
        contract_id = contract or self._create(offer or self._cheapest_offer())
        try:
            remote = self._wait_until_running(contract_id, key)
            self._deploy(remote)
            remote.start_triton(self.definition)
            remote.open_tunnels(self.definition)
            self._wait_until_ready()
        except BaseException:
            say(
                f"Instance {contract_id} goes on and costs: make bring-up CONTRACT_ID={contract_id} "
                f"goes on here, make destroy-instance CONTRACT_ID={contract_id} ends it."
            )
            raise
        say("All models are ready.")
        print(settings_line(self.definition))

    def _create(self, offer_id: int) -> int:
        offer = self.vast.offer(offer_id, self.definition)
        cap = self.definition.max_price
        if cap is not None and offer.price > cap:
            raise InputError(
                f"Offer {offer_id} costs ${offer.price:.3f} an hour, more than MAX_PRICE={cap:g}."
            )
        contract_id = self.vast.create(offer_id, self.definition)
        say(
            f"Rented {offer.gpus} x {offer.gpu} for ${offer.price:.3f} an hour as instance "
            f"{contract_id}: CONTRACT_ID={contract_id}"
        )
        return contract_id

    def _cheapest_offer(self) -> int:
        if self.definition.max_price is None:
            raise InputError(
                "INSTANCE_ID is missing: without MAX_PRICE you have to choose yourself."
            )
        offers = self.vast.search(self.definition)
        if not offers:
            raise VastError("There is no such offer now: ask for less in SEARCH=, or MAX_PRICE=.")
        return offers[0].id

    def _wait_until_running(self, contract_id: int, key: Path | None) -> Remote:
        wait = Wait(self.definition.wait_minutes)
        refused_since: float | None = None
        while True:
            found = self.vast.instance(contract_id)
            reason = _status(found)
            try:
                if found.status == "running":
                    remote = Remote(_state(contract_id), found, key)
                    remote.check()
                    return remote
            except UnreachableError as error:
                reason = str(error)
            except KeyRefusedError as error:
                refused_since = refused_since or wait.seconds
                if wait.seconds - refused_since > KEY_SECONDS:
                    raise
                reason = str(error)
            if not wait.goes_on(reason):
                raise RemoteError(f"{reason} (waited {wait.seconds:.0f} s)")

    def _wait_until_ready(self) -> None:
        wait = Wait(self.definition.wait_minutes, longest_pause=1.0)
        address = self.definition.http_address
        while not server.is_ready(address):
            try:
                failed = server.failures(address)
            except ServerError:
                failed = []  # it listens only when it has loaded its first models
            if failed:
                raise ServerError(f"Triton cannot load {'; '.join(failed)}")
            if not wait.goes_on("Triton loads its models"):
                raise ServerError("The models are not ready: make check-logs-tritonserver")

    def _deploy(self, remote: Remote) -> None:
        changed = remote.deploy(self.definition)
        if not changed:
            say("The models on the instance are those here.")

    def _remote(self) -> Remote:
        """The instance CONTRACT_ID, which must be running."""
        contract_id = self._contract_id()
        key = find_key(_path("PRIVATE_SSH_KEY"))
        found = self.vast.instance(contract_id)
        if found.status != "running":
            raise RemoteError(f"{_status(found)}: not yet, try again (make show-instances).")
        return Remote(_state(contract_id), found, key)

    def _exists(self, contract_id: int) -> bool:
        try:
            self.vast.instance(contract_id)
        except MissingError:
            return False
        return True

    def _offer_id(self) -> int:
        return identifier(
            "INSTANCE_ID", _given("INSTANCE_ID"), "make search-instance lists offers."
        )

    def _contract_id(self) -> int:
        return identifier("CONTRACT_ID", _given("CONTRACT_ID"), "make show-instances lists yours.")


_COMMANDS: dict[str, Callable[[Commands], None]] = {
    name.replace("_", "-"): method
    for name, method in vars(Commands).items()
    if not name.startswith("_")
}


def main() -> int:
    """Run one command; the exit status."""
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    if name not in _COMMANDS:
        say(f"usage: python -m nvidia_triton {'|'.join(_COMMANDS)}")
        return 2
    try:
        _COMMANDS[name](Commands())
    except (InputError, VastError, RemoteError, ServerError) as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("Interrupted.")
        return 130
    except BrokenPipeError:
        # The reader left; Python would complain again while it closes standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _refuse_unknown() -> None:
    """Raise InputError for a misspelled variable: MAXPRICE=0.2 must not rent at MAX_PRICE."""
    unknown, known = os.environ.get("UNKNOWN", "").split(), os.environ.get("KNOWN", "").split()
    for name in unknown:
        near = difflib.get_close_matches(name.upper().replace("-", "_"), known, 1)
        remedy = f"did you mean {near[0]}?" if near else "make help lists them."
        raise InputError(f"{clean(name)} is no variable of this Makefile: {remedy}")


def _given(name: str) -> str | None:
    """A variable of make's command line, "" if it is empty there, None if it is not there."""
    return os.environ.get(name, "") if name in os.environ.get("TOLD", "").split() else None


def _refuse_exported_ids() -> None:
    """Raise InputError if an id was meant, perhaps: without any, the cheapest offer is rented."""
    for name in ("CONTRACT_ID", "INSTANCE_ID"):
        if name in os.environ:
            raise InputError(f"{name} is exported, which does not count: make bring-up {name}=...")


def _path(name: str) -> Path | None:
    """A path among the variables; a relative one begins where make runs."""
    text = os.environ.get(name)
    if text == "":
        raise InputError(f"{name} is empty: give a path, or leave it out.")
    return _HERE / Path(text).expanduser() if text else None


def _state(contract_id: int) -> Path:
    """The folder of what we know about one instance."""
    return (_path("STATE_DIR") or _HERE / ".state") / str(contract_id)


def _status(found: Instance) -> str:
    return f"Instance {found.id} is {found.status}" + (
        f" ({found.message})" if found.message else ""
    )


def settings_line(definition: Definition) -> str:
    """The service's settings (app/core/settings/) for Triton at the tunnels' ends, for a shell's eval."""
    address = definition.tunnels_address
    settings = {
        "TRITON_GRPC_SERVICE": f"{address}:{definition.grpc_port}",
        "TRITON_HTTP_SERVICE": definition.http_address,
        "TRITON_METRICS_SERVICE": f"{address}:{definition.metrics_port}",
        "LLM_MODEL_REPOSITORY": str(definition.models),
    }
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())


def _log_lines() -> int | None:
    """Number of lines of the log; None: all."""
    lines = os.environ.get("LOG_LINES")
    return identifier("LOG_LINES", lines, "a number of lines.") if lines else None


def _print_log(remote: Remote, definition: Definition, lines: int | None) -> None:
    for line in remote.log(definition, lines):
        print(line)


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def is_confirmed(question: str) -> bool:
    """Ask; anything but a yes, no answer included, is a no."""
    sys.stderr.write(question)
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


if __name__ == "__main__":
    sys.exit(main())
