"""The part of a job's script that joins several nodes to one Ray cluster (https://docs.ray.io).

The batch script runs on the first node: Ray's head, the check of its GPUs, and Triton. One task of
`srun` on each other node runs Ray there. The job ends when any of these ends.

vLLM's own mode of several nodes (`nnodes`, `master_addr`) is not used: it needs a second command line
of vLLM on each other node that repeats model.json, and it has no authentication. Ray's own
ports listen on all interfaces of a node, so that each call needs a random token of the job.
"""

import shlex
from dataclasses import dataclass

MIN_RAY = (
    "2.52"  # the first with tokens: https://docs.ray.io/en/latest/ray-security/token-auth.html
)
_MAX_WAIT_SECONDS = 300
# vLLM sends tensors by NCCL and messages by queues of its own, not by Ray's store.
_STORE_BYTES = 1 << 30

# The environment of a job may have variables of these names.
_START = "parts=() ray_scratch= reason=\n"

# `reason` is the last line of the output, which the launch's reason shows.
_ENDING = r"""    [[ -z ${parts[*]} ]] || kill -TERM "${parts[@]}" 2>/dev/null
    for ((second = 0; second < 20; second++)); do
        kill -0 "${parts[@]}" 2>/dev/null || break
        sleep 1
    done
    [[ -z $ray_scratch ]] || rm -rf -- "$ray_scratch"
    [[ -z $reason ]] || echo "$reason"
"""

_CLUSTER = r"""
# Ray over {nodes} nodes. Ended by `finish`: the processes in `parts`.
fail() {{
    reason=$*
    exit 1
}}

# The address by which Slurm and the other nodes reach this one.
node_address() {{
    local name address
    name=$(scontrol show node --oneliner "$SLURMD_NODENAME" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    address=$(getent ahostsv4 "${{name:-$SLURMD_NODENAME}}" | sed -n '1s/ .*//p')
    # Its own name may lead to the loopback.
    [[ $address == 127.* && $name != 127.* ]] && address=$(hostname -I | sed 's/ .*//')
    printf '%s' "$address"
}}

# Ray on this node, until it ends: never with status 0. The files of Ray are in $ray_scratch.
ray_node() {{
    local code ray
    {ray} start --block --node-ip-address="$VLLM_HOST_IP" --num-gpus={gpus} --num-cpus={cpus} \
        --object-store-memory={store} --temp-dir="$ray_scratch" --disable-usage-stats \
        --dashboard-agent-listen-port="$(free_port)" "$@" &
    ray=$!
    trap 'kill -TERM "$ray" 2>/dev/null; wait "$ray"; exit 143' TERM INT
    wait "$ray"
    code=$?
    exit $((code ? code : 1))
}}

# Ray on another node: the head's address and its folder.
other_node() {{
    # Older releases of Ray have the path of the head's on all nodes. It exists if these share their /tmp.
    ray_scratch=$2
    mkdir -m 700 -- "$ray_scratch" 2>/dev/null ||
        ray_scratch=$(mktemp -d --tmpdir=/tmp llm-ray.XXXXXX) || exit 1
    trap 'rm -rf -- "$ray_scratch"' EXIT
    export VLLM_HOST_IP=$(node_address) APPTAINER_BIND="$binds$ray_scratch"
    ray_node --address="$1"
}}

version=$({ray} --version 2>/dev/null | sed -n 's/^ray, version //p')
[[ -n $version ]] || fail {missing}
printf '%s\n' {least} "$version" | sort --check=quiet --version-sort || fail {old}"$version"
head -c 32 /dev/urandom | base64 >ray-token
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$directory/ray-token" RAY_USAGE_STATS_ENABLED=0
ray_scratch=$(mktemp -d --tmpdir=/tmp llm-ray.XXXXXX) || exit 1
export binds="${{APPTAINER_BIND:+$APPTAINER_BIND,}}"
export APPTAINER_BIND="$binds$ray_scratch" VLLM_HOST_IP=$(node_address)
[[ -n $VLLM_HOST_IP ]] || fail "$SLURMD_NODENAME has no IPv4 address"
gcs=$(free_port "$VLLM_HOST_IP") client=()
# Ray's client server has one port on all machines, and an option for it only where Ray has that server.
# Ray refuses port 1 before it starts anything, and the option itself without the server.
[[ $({ray} start --head --ray-client-server-port=1 2>&1) == *"ray[client]"* ]] ||
    client=(--ray-client-server-port="$(free_port "$VLLM_HOST_IP")")
ray_node --head --port="$gcs" "${{client[@]}}" --include-dashboard=false &
head=$!
parts=("$head")
export RAY_ADDRESS=$VLLM_HOST_IP:$gcs
deadline=$((SECONDS + {seconds}))
until (: <>"/dev/tcp/$VLLM_HOST_IP/$gcs") 2>/dev/null; do
    kill -0 "$head" 2>/dev/null || fail "Ray did not start on the first node, $SLURMD_NODENAME"
    ((SECONDS < deadline)) || fail "Ray did not start on $SLURMD_NODENAME within {seconds} seconds"
    sleep 1
done
# Its own shell: a step does not have this one's functions. RAY_ADDRESS is for clients of Ray only.
env -u RAY_ADDRESS srun --nodes={others} --ntasks={others} --ntasks-per-node=1 --relative=1 \
    --cpus-per-task={cpus} --mpi=none --input=none --kill-on-bad-exit=1 \
    bash -c "$(declare -f free_port node_address ray_node other_node); other_node $RAY_ADDRESS $ray_scratch" &
workers=$!
parts+=("$workers")
while :; do
    gpus=$(timeout 30 {ray} status 2>/dev/null | sed -n 's|^ *[0-9.]*/\([0-9]*\)\.0 GPU.*|\1|p')
    [[ $gpus != {total} ]] || break
    kill -0 "$head" 2>/dev/null || fail "Ray ended on the first node, $SLURMD_NODENAME"
    kill -0 "$workers" 2>/dev/null || fail "Ray ended on another node than $SLURMD_NODENAME"
    ((SECONDS < deadline)) || fail "Ray has ${{gpus:-0}} of {total} GPUs after {seconds} seconds"
    sleep 2
done
echo "Ray $version has {total} GPUs on {nodes} nodes"
"""

_WATCH = r"""parts+=("$server")
while kill -0 "$head" && kill -0 "$workers" && kill -0 "$server"; do
    sleep 2 &
    wait $!
done 2>/dev/null
kill -0 "$server" 2>/dev/null && fail "Ray ended on one of the nodes, and the server with it"
"""


@dataclass(frozen=True, slots=True)
class RayPart:
    """Texts for a job's script: at its start, before and after Triton's command, and when it ends."""

    start: str = ""
    cluster: str = ""
    watch: str = ""
    ending: str = ""


def ray_part(
    *, nodes: int, gpus: int, cpus: int, start_minutes: float, ray: list[str], remedy: str
) -> RayPart:
    """Parts of the script of a launch on `nodes` nodes with `gpus` and `cpus` each.

    `ray`: the words of Ray's command on each node; `remedy`: how it gets installed.
    """
    if nodes == 1:
        return RayPart()
    cluster = _CLUSTER.format(
        nodes=nodes,
        others=nodes - 1,
        gpus=gpus,
        cpus=cpus,
        total=nodes * gpus,
        store=_STORE_BYTES,
        seconds=max(1, min(_MAX_WAIT_SECONDS, round(start_minutes * 60))),
        ray=shlex.join(ray),
        least=MIN_RAY,
        missing=shlex.quote(f"a launch over several nodes needs Ray, which is missing: {remedy}"),
        old=shlex.quote(
            f"a launch over several nodes needs Ray {MIN_RAY} or newer: {remedy}; found "
        ),
    )
    return RayPart(_START, cluster, _WATCH, _ENDING)
