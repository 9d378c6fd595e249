"""A real Slurm on loopback for a test session: munged, slurmctld and slurmd, state in one folder.

One node, `localhost`, or a pair, each with a GPU that is none (/dev/zero). Needs root, and Debian's packages munge,
slurm-wlm and slurm-client.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from app.cli.up import processes

NODE = "localhost"
_HOST = socket.gethostname().split(".")[0]
# Debian's Slurm takes several slurmd on one machine if no node is named localhost.
PAIR = (_HOST, f"{_HOST}-2")
PARTITION, OTHER_PARTITION = "main", "short"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")
_START_SECONDS = 20.0
_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock
SlurmUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
SlurmdParameters=config_overrides
KillWait=2
SlurmdTimeout=5
OverTimeLimit=0
ReturnToService=0
MailProg=/bin/true
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 DefMemPerCPU=100
PartitionName=short Nodes=ALL MaxTime=1 DefMemPerCPU=100
"""
_NODE = "NodeName={} NodeHostname={} NodeAddr=127.0.0.1 Port={} CPUs=8 RealMemory=8000 Gres=gpu:1"


def is_installed() -> bool:
    """Return True if this machine can run it."""
    paths = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return os.geteuid() == 0 and all(shutil.which(name, path=paths) for name in PROGRAMS)


@dataclass
class SlurmCluster:
    """A running cluster; its clients need `environment`."""

    directory: Path
    nodes: tuple[str, ...] = (NODE,)
    kept: set[str] = field(default_factory=set)  # names of jobs that are none of a test's

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.directory / "slurm.conf")}

    def run(self, *command: str, check: bool = True) -> str:
        """A client's standard output."""
        done = subprocess.run(
            command, env=os.environ | self.environment, capture_output=True, text=True, check=False
        )
        assert not check or done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def jobs(self) -> list[str]:
        """Ids of the jobs that wait or run."""
        lines = self.run("squeue", "--noheader", "--format=%i %j").splitlines()
        return [line.split()[0] for line in lines if line.split()[1] not in self.kept]

    def settle(self) -> None:
        """Cancel all jobs, and make the nodes accept jobs again."""
        if jobs := self.jobs():
            self.run("scancel", *jobs)
        deadline = time.monotonic() + 30
        while self.jobs():
            assert time.monotonic() < deadline, self.run("squeue")
            time.sleep(0.1)
        self.run(
            "scontrol", "update", f"nodename={','.join(self.nodes)}", "state=resume", check=False
        )


@contextlib.contextmanager
def start_slurm(nodes: tuple[str, ...] = (NODE,)) -> Iterator[SlurmCluster]:
    """A cluster for as long as the context lasts. Its folder has a short path: sockets need one."""
    directory = Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster = SlurmCluster(directory, nodes)
    started: list[subprocess.Popen[bytes]] = []
    try:
        _configure(directory, nodes)
        log = directory / "daemons.log"
        environment = os.environ | cluster.environment
        munge = ["--foreground", f"--key-file={directory}/munge.key", f"--socket={directory}/munge.sock",
                 f"--pid-file={directory}/munge.pid", f"--log-file={directory}/munge.log",
                 f"--seed-file={directory}/munge.seed", "--force"]  # fmt: skip
        for command in (
            ["/usr/sbin/munged", *munge],
            ["/usr/sbin/slurmctld", "-D", "-c"],
            *(["/usr/sbin/slurmd", "-D", "-N", node] for node in nodes),
        ):
            if len(started) == 1:
                _wait(lambda: (directory / "munge.sock").exists(), directory)
            started.append(processes.spawn(command, log_file=log, env=environment))
        states = ("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T")
        idle = ["idle"] * len(nodes)
        _wait(lambda: cluster.run(*states, check=False).split() == idle, directory)
        yield cluster
        cluster.settle()
    finally:
        for process in reversed(started):
            family = processes.descendants(process.pid)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            processes.kill(family)
        shutil.rmtree(directory, ignore_errors=True)


def _configure(directory: Path, nodes: tuple[str, ...]) -> None:
    directory.chmod(0o755)
    (directory / "state").mkdir()
    key = directory / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    names = (_HOST, *nodes[1:])
    lines = [
        _NODE.format(node, name, processes.free_port())
        for node, name in zip(nodes, names, strict=True)
    ]
    config = _CONFIG.format(
        host=_HOST, directory=directory, ctld_port=processes.free_port(), nodes="\n".join(lines)
    )
    (directory / "slurm.conf").write_text(config)
    gpus = "".join(f"NodeName={node} Name=gpu File=/dev/zero\n" for node in nodes)
    (directory / "gres.conf").write_text(gpus)


def _wait(condition: object, directory: Path) -> None:
    assert callable(condition)
    deadline = time.monotonic() + _START_SECONDS
    while not condition():
        logs = "".join(log.read_text()[-2000:] for log in directory.glob("*.log"))
        assert time.monotonic() < deadline, logs
        time.sleep(0.1)
