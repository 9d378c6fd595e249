"""The script of a job, and the files of its directory: the same for Slurm and for this machine.

The directory is the launch's fence. The worker that ends a launch removes it, and a job without its
directory ends at once: no job outlives its launch. The script writes there:

    log        the job's output
    address    the node and its ports of gRPC and metrics, once they are chosen
    running    a folder: a second job of the launch ends at once
    exit       its exit status and its run time in seconds, when it ends

It reads `secret` there, which Triton's clients must send: the script, which teams see, has no
secret. If the profile is supervised, health/ is the supervisor that runs Triton (triton/health).

Every value matches a pattern (`patterns`), and is also quoted.
"""

import io
import shlex
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

import orjson

from app.core.program import ROOT
from app.inference.adapters import ADAPTERS_FILE
from app.inference.model_repository import CONFIG
from app.inference.triton_access import restriction
from app.provisioning.profiles import Profile
from app.provisioning.ray_script import MIN_RAY, RayPart, ray_part
from app.provisioning.spec import LaunchSpec

LAUNCH_VARIABLE = "LAUNCH_ID"  # in the environment of every process of a launch
# Below Linux's range for outgoing connections.
_FIRST_PORT, _PORTS = 20_000, 12_000
_HTTP = '--http-address=127.0.0.1 --http-port="$http"'  # the supervisor adds the restrictions
_VALUE = '"$LLM_TRITON_SECRET"'
_HEALTH = ROOT / "triton" / "health"

_SCRIPT = r"""umask 077
directory={directory}
cd -- "$directory" || exit 1
exec >>"$directory/log" 2>&1 </dev/null
export {variable}={launch}
mkdir running || exit 0  # it was submitted twice, and the other one runs

{start}finish() {{
    code=$?
    printf '%s %s\n' "$code" "$SECONDS" >exit.new && mv -f exit.new exit
{ending}}}
trap finish EXIT
trap 'exit 143' TERM INT

# Any free port of an address of the node, by default of its loopback.
free_port() {{
    local port
    while :; do
        port=$(({first_port} + (RANDOM * 32768 + RANDOM) % {ports}))
        (: <>"/dev/tcp/${{1:-127.0.0.1}}/$port") 2>/dev/null || break
    done
    printf '%s' "$port"
}}
grpc=$(free_port) http=$(free_port) metrics=$(free_port)
# A cancellation may end the search before it reaches this shell: no address without its ports.
[[ -n $grpc && -n $http && -n $metrics ]] || exit 143
node=${{SLURMD_NODENAME:-127.0.0.1}}
read -r LLM_TRITON_SECRET <secret || exit 1
# For the supervisor, whose health check is the only client of HTTP.
export LLM_TRITON_SECRET TRITON_HTTP_SERVICE=127.0.0.1:"$http" TRITON_METRICS_SERVICE={listen}:"$metrics"

{environment}
{prepare}
{cluster}{command} \
    --model-repository={directory}/repository --model-control-mode=explicit --load-model={served} \
    --grpc-address={listen} --grpc-port="$grpc" --metrics-address={listen} --metrics-port="$metrics" \
    {access} &
server=$!
trap 'kill -TERM "$server" 2>/dev/null; wait "$server"; exit 143' TERM INT
printf '%s %s %s\n' "$node" "$grpc" "$metrics" >address.new && mv -f address.new address
{watch}wait "$server"
"""


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """The model that a launch serves, after its path was looked up.

    `path` is None for a Hugging Face id; `is_entry`: it is an entry of a Triton model repository.
    `adapters`: directories of adapters by name, without those that are Hugging Face ids. `rank`: the
    largest one of theirs, as the engine's option takes it.
    """

    path: str | None = None
    is_entry: bool = False
    adapters: Mapping[str, str] = field(default_factory=dict)
    rank: int | None = None


def job_name(launch: UUID) -> str:
    return f"llm-{launch}"


def directory_of(profile: Profile, launch: UUID) -> str:
    return f"{profile.home}/launches/{launch}"


def render_script(
    launch: UUID, spec: LaunchSpec, profile: Profile, place: ModelPlace | None = None
) -> str:
    place = place or ModelPlace(spec.model if spec.model.startswith("/") else None)
    directory = directory_of(profile, launch)
    ray = _ray(spec, profile, directory, place)
    body = _SCRIPT.format(
        directory=shlex.quote(directory),
        variable=LAUNCH_VARIABLE,
        launch=shlex.quote(str(launch)),
        first_port=_FIRST_PORT,
        ports=_PORTS,
        environment=_environment(spec, profile),
        access=_HTTP if profile.is_supervised else f"--allow-http=false {restriction(_VALUE)}",
        prepare=_prepare(spec, profile, directory),
        command=shlex.join(_command(spec, profile, directory, place)),
        served=shlex.quote(spec.served_name),
        listen=shlex.quote(profile.listen),
        start=ray.start,
        cluster=ray.cluster,
        watch=ray.watch,
        ending=ray.ending,
    )
    options = _sbatch_options(launch, spec, directory) if profile.provider == "slurm" else []
    # `module` is a function of login shells.
    shell = "#!/bin/bash -l" if spec.modules else "#!/bin/bash"
    return "\n".join([shell, *(f"#SBATCH {option}" for option in options), body])


def _sbatch_options(launch: UUID, spec: LaunchSpec, directory: str) -> list[str]:
    """No value has a blank: see `patterns`."""
    options: dict[str, object] = {
        "job-name": job_name(launch),
        "comment": spec.name,
        "chdir": directory,
        "output": f"{directory}/log",
        "open-mode": "append",
        "nodes": spec.nodes,
        "ntasks": spec.nodes,
        "ntasks-per-node": 1 if spec.nodes > 1 else None,
        "cpus-per-task": spec.cpus,
        "mem": f"{spec.memory_gb}G",
        "time": spec.time_limit_minutes,
        "gres": spec.gres,
        "partition": spec.partition,
        "account": spec.account,
        "constraint": spec.constraint,
        "nice": -spec.priority or None,
    }
    # A job that Slurm requeues would find its own old files: let it fail instead.
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return [*given, "--no-requeue"]


def _environment(spec: LaunchSpec, profile: Profile) -> str:
    lines = []
    if spec.modules:
        lines.append(f"module load {shlex.join(spec.modules)} || exit 1")
    if profile.cache is not None:
        lines.append(f"export HF_HOME={shlex.quote(profile.cache)}")
    lines.append(
        f"export HF_HUB_OFFLINE={int(profile.offline)} DO_NOT_TRACK=1 VLLM_NO_USAGE_STATS=1"
    )
    return "\n".join(lines)


def _prepare(spec: LaunchSpec, profile: Profile, directory: str) -> str:
    if profile.runtime != "embedded":
        return f'echo "starting {spec.served_name} on $node"'
    assert profile.triton is not None
    assert profile.venv is not None
    layout = ["sh", f"{profile.triton}/layout.sh", profile.venv, f"{profile.triton}/backends"]
    return f"{shlex.join([*layout, directory])} || exit 1"


def _command(spec: LaunchSpec, profile: Profile, directory: str, place: ModelPlace) -> list[str]:
    """The command that Triton's own options are appended to; the launch's directory is its working one."""
    if profile.runtime == "embedded":
        assert profile.venv is not None
        serve = ["sh", f"{profile.triton}/serve.sh", profile.venv, directory]
        return [*_supervisor(profile, directory, f"{profile.venv}/bin/python"), *serve]
    command = [*_supervisor(profile, directory, "python3"), *profile.command]
    if profile.runtime == "plain":
        return command
    return [*_container(spec, profile, directory, place), *command]


def _container(spec: LaunchSpec, profile: Profile, directory: str, place: ModelPlace) -> list[str]:
    """The words before a command that run it inside the profile's image."""
    assert profile.image is not None
    binds = [f"{directory}:{directory}"]
    if profile.cache is not None:
        binds.append(f"{profile.cache}:{profile.cache}")
    models = [*([place.path] if place.path is not None else []), *place.adapters.values()]
    binds += [f"{path}:{path}:ro" for path in dict.fromkeys(models)]
    words = ["apptainer", "exec", *(["--nv"] if spec.gpus else []), "--pwd", directory]
    for bind in binds:
        words += ["--bind", bind]
    return [*words, profile.image]


def _ray(spec: LaunchSpec, profile: Profile, directory: str, place: ModelPlace) -> RayPart:
    package = shlex.quote(f"ray>={MIN_RAY}")
    if profile.runtime == "embedded":
        # As serve.sh does for Triton.
        unset = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")
        words = ["env", *(f"--unset={name}" for name in unset), f"{profile.venv}/bin/ray"]
        remedy = f"{profile.venv}/bin/pip install {package}"
    elif profile.runtime == "apptainer":
        words = [*_container(spec, profile, directory, place), "ray"]
        remedy = f"pip install {package} in the image {profile.image}"
    else:
        words, remedy = ["ray"], f"pip install {package}, with the command on PATH of each node"
    return ray_part(
        nodes=spec.nodes,
        gpus=spec.gpus,
        cpus=spec.cpus,
        start_minutes=spec.start_minutes,
        ray=words,
        remedy=remedy,
    )


def _supervisor(profile: Profile, directory: str, python: str) -> list[str]:
    """The supervisor, which restarts an ill server; a server that never started ends the job.

    It probes a model only after its use: a probe is a request, and an idle server is to be stopped.
    """
    if not profile.is_supervised:
        return []
    return [python, f"{directory}/health", "run", "--must-start", "--only-used", "--"]


def engine_settings(spec: LaunchSpec, place: ModelPlace) -> dict[str, Any]:
    """The content of model.json: the engine's arguments."""
    settings: dict[str, Any] = {"model": place.path or spec.model}
    if spec.revision is not None:
        settings |= {"revision": spec.revision, "tokenizer_revision": spec.revision}
    if spec.all_gpus > spec.pipeline_stages:
        settings["tensor_parallel_size"] = spec.all_gpus // spec.pipeline_stages
    if spec.nodes > 1:
        settings["pipeline_parallel_size"] = spec.pipeline_stages
        settings["distributed_executor_backend"] = "ray"
    if not spec.gpus:
        settings["enforce_eager"] = True
    if spec.trust_remote_code:
        settings["trust_remote_code"] = True
    if spec.adapters:
        settings["enable_lora"] = True
        if place.rank is not None:
            settings["max_lora_rank"] = place.rank
    return settings | spec.engine.model_dump(exclude_none=True)


def pack_directory(script: str, spec: LaunchSpec, place: ModelPlace, secret: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:

        def add(
            name: str, content: bytes = b"", link: str = "", kind: bytes = tarfile.REGTYPE
        ) -> None:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, link, len(content)
            member.mode = 0o700 if kind == tarfile.DIRTYPE else 0o600
            archive.addfile(member, io.BytesIO(content))

        add("job.sh", script.encode())
        add("secret", f"{secret}\n".encode())
        add("health", kind=tarfile.DIRTYPE)
        for file in sorted(_HEALTH.glob("*.py")):
            add(f"health/{file.name}", file.read_bytes())
        add("repository", kind=tarfile.DIRTYPE)
        entry = f"repository/{spec.served_name}"
        if place.is_entry:
            assert place.path is not None
            add(entry, link=place.path, kind=tarfile.SYMTYPE)
            # Under any served name, the paths in its model.json ("models/demo/1") lead to it.
            add("models", kind=tarfile.DIRTYPE)
            for name in sorted({PurePosixPath(path).name for path in (spec.model, place.path)}):
                add(f"models/{name}", link=place.path, kind=tarfile.SYMTYPE)
        else:
            for directory in (entry, f"{entry}/1"):
                add(directory, kind=tarfile.DIRTYPE)
            add(f"{entry}/config.pbtxt", CONFIG.encode())
            settings = orjson.dumps(engine_settings(spec, place), option=orjson.OPT_INDENT_2)
            add(f"{entry}/1/model.json", settings)
            if spec.adapters:
                add(f"{entry}/1/{ADAPTERS_FILE}", orjson.dumps({**spec.adapters, **place.adapters}))
    return buffer.getvalue()
