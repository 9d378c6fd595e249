#!/bin/sh
# Remote part of make's commands, on the instance. Never copied there: instance.py sends it through ssh to
#
#   sh -s -- COMMAND MODELS [ARGUMENT...]
#
# MODELS is the repository that Triton reads. Next to it are its log (logs.log), MODELS.deployed with
# the models' versions, MODELS.health with the supervisor (triton/health), and MODELS.server with the
# supervisor's process. Ends with 1 and one line on
# standard error when something is missing.
set -eu

fail() {
    echo "$*" >&2
    exit 1
}

# State and start (in ticks after boot) of a process; the start distinguishes it from a later one with its
# number. Nothing for one that has ended and only waits to be collected.
started() {
    sed -n 's/^.*) //p' "/proc/$1/stat" 2>/dev/null | awk '$1 != "Z" { print $20 }'
}

# The process of the server that `start` started, if it runs.
server() {
    [ -f "$run/process" ] || return 1
    read -r pid start < "$run/process" || return 1
    [ -n "$start" ] && [ "$(started "$pid")" = "$start" ] && echo "$pid"
}

# One command at a time, where util-linux is there.
lock() {
    mkdir -p "$run"
    exec 9> "$run/lock"
    if command -v flock > /dev/null; then flock 9; fi
}

# start MODELS TRITONSERVER HTTP GRPC METRICS
start() {
    program=$1 http=$2 grpc=$3 metrics=$4
    lock
    if pid=$(server); then
        echo "tritonserver runs already (process $pid)."
        return
    fi
    PATH=$PATH:/opt/tritonserver/bin
    export PATH
    command -v "$program" > /dev/null || fail "there is no $program: is it the image of tritonserver?"
    command -v python3 > /dev/null || fail "there is no python3, which the supervisor needs"
    mkdir -p "$models"
    cd "$home" # paths in model.json are relative to it
    if [ "$(stat -c %s "$log" 2>/dev/null || echo 0)" -gt 50000000 ]; then mv -f "$log" "$log.old"; fi
    rm -f "$run/process"
    # By these protocols a client can write files and map memory: the service needs none of them, so
    # no process keeps their secret. Loading on request is refused under polling.
    secret=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
    restricted="shared-memory,trace,logging:llm-secret=$secret"
    # The supervisor restarts a server that ended, or whose engine is dead behind a ready model.
    set -- python3 "$models.health" run --must-start \
        --http "127.0.0.1:$http" --metrics "127.0.0.1:$metrics" -- \
        "$program" --model-repository="$models" \
        --model-control-mode=poll --repository-poll-secs=5 --exit-on-error=false \
        --http-address=127.0.0.1 --http-port="$http" \
        --grpc-address=127.0.0.1 --grpc-port="$grpc" \
        --metrics-address=127.0.0.1 --metrics-port="$metrics" \
        --http-restricted-api="$restricted" --grpc-restricted-protocol="$restricted"
    # The shell that notes its process becomes the supervisor. It keeps its standard input: tmux ends a
    # session whose terminal no process holds.
    # shellcheck disable=SC2016 # expanded by that shell
    set -- sh -c 'run=$1 log=$2 path=$3
        shift 3
        exec >> "$log" 2>&1 9>&-
        PATH=$path
        export PATH
        # Triton starts its Python models by bash, which reads ~/.bashrc where it sees SSH_CLIENT: what
        # that puts in PATH may be another Python than the server needs.
        unset SSH_CLIENT SSH2_CLIENT SSH_CONNECTION SSH_TTY
        echo "--- $(date -u +%FT%TZ) tritonserver starts"
        echo "$$ $(sed -n "s/^.*) //p" /proc/$$/stat | cut -d " " -f 20)" > "$run/process.new"
        mv "$run/process.new" "$run/process"
        exec "$@"' tritonserver "$run" "$log" "$PATH" "$@"
    # A session of its own, which outlives this one: of tmux where that is, to be found by people.
    if ! tmux new-session -d -s tritonserver "$@" > /dev/null 2>&1 9>&-; then
        setsid "$@" > /dev/null 2>&1 < /dev/null 9>&- &
    fi
    wait_for_start
}

# Whether a process has a child; true where the kernel has no list of them.
has_started() {
    children=/proc/$1/task/$1/children
    [ ! -r "$children" ] || [ -n "$(cat "$children")" ]
}

wait_for_start() {
    tenths=0
    until [ -f "$run/process" ]; do
        [ "$tenths" -lt 300 ] || fail "tritonserver did not start: make check-logs-tritonserver"
        sleep 0.1
        tenths=$((tenths + 1))
    done
    # A wrong option or a taken port ends it soon, once the supervisor has started it.
    looks=0
    for _ in $(seq 150); do
        pid=$(server) ||
            fail "tritonserver ended at once: $(grep -v "Z supervisor: " "$log" | tail -n 1)"
        if has_started "$pid"; then looks=$((looks + 1)); fi
        if [ "$looks" -eq 10 ]; then break; fi
        sleep 0.2
    done
    echo "tritonserver runs (process $pid), its log is $log."
}

# stop MODELS
stop() {
    lock
    if ! pid=$(server); then
        echo "No tritonserver runs that was started by make."
        return
    fi
    echo "Ending tritonserver (process $pid)."
    kill -TERM "$pid" 2> /dev/null || true
    fifths=0
    while server > /dev/null && [ "$fifths" -lt 225 ]; do
        sleep 0.2
        fifths=$((fifths + 1))
        if [ $((fifths % 50)) -eq 0 ]; then echo "It unloads its models, $((fifths / 5)) s."; fi
    done
    # The supervisor's children end with it.
    kill -KILL -- "-$pid" 2> /dev/null || true
    rm -f "$run/process"
    echo "tritonserver has ended."
}

# log MODELS LINES
log() {
    [ -f "$log" ] || fail "there is no log yet: make run-tritonserver"
    if [ -n "$1" ]; then tail -n "$1" "$log"; else cat "$log"; fi
}

# prepare MODELS NAME...: before the upload to MODELS.deployed/NAME/incoming
prepare() {
    command -v rsync > /dev/null || fail "rsync is not installed there: see onstart in the definition"
    mkdir -p "$models"
    for name; do
        mkdir -p "$deployed/$name"
    done
}

# publish MODELS NAME...: after it
publish() {
    lock
    for name; do
        versions=$deployed/$name
        version=$versions/$(date +%s.%N)
        # Byte code beside a model in Python would look like a change, and have it loaded again. Its
        # interpreter heeds no PYTHONDONTWRITEBYTECODE, but makes none where a file has the folder's name.
        # shellcheck disable=SC2016 # expanded by that shell
        find "$versions/incoming" -name '*.py' \
            -exec sh -c 'for file; do : > "${file%/*}/__pycache__"; done' sh {} +
        mv -T "$versions/incoming" "$version"
        previous=$(readlink "$models/$name") || true
        if [ -e "$models/$name" ] && [ ! -L "$models/$name" ]; then
            rm -rf "$versions/replaced"
            mv -T "$models/$name" "$versions/replaced" # it came in another way
            previous=$versions/replaced
        fi
        ln -s "$version" "$versions/link"
        mv -T "$versions/link" "$models/$name"
        # The server may still be reading the previous one.
        for old in "$versions"/*; do
            if [ "$old" != "$version" ] && [ "$old" != "$previous" ]; then rm -rf "$old"; fi
        done
        echo "$name is in place."
    done
}

command=$1 models=$2
shift 2
home=$(dirname "$models") log=$(dirname "$models")/logs.log
run=$models.server deployed=$models.deployed
case $command in
    start | stop | log | prepare | publish) "$command" "$@" ;;
    *) fail "there is no command $command" ;;
esac
