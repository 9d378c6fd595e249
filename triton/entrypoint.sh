#!/bin/sh
# The container's start: serve /models on 8001 (gRPC) and 8002 (metrics), under the supervisor
# (health/), which restarts a server that ended or is ill, and is the client of HTTP on loopback.
# Arguments go to tritonserver, e.g. --load-model=demo instead of every model of the repository.
#
# MOCK_MODEL           1: serve the scripted model of the image in place of /models (docs/tenstorrent.md)
# LLM_TRITON_SECRET    the server's secret, which the service's requests carry (docs/servers.md)
# TRITON_BIND_ADDRESS  address to listen on; the default is every address of the container, which
#                      only its own network and its published ports reach
set -eu

address=${TRITON_BIND_ADDRESS:-0.0.0.0}
if [ -z "${LLM_TRITON_SECRET:-}" ]; then
    echo "LLM_TRITON_SECRET is missing: every client could have this server run code." >&2
    exit 1
fi
case "${MOCK_MODEL:-0}" in
    0) repository=/models ;;
    1) repository=/opt/llm/models ;;
    *)
        echo "MOCK_MODEL must be 0 or 1, not '$MOCK_MODEL'." >&2
        exit 1
        ;;
esac
case " $* " in
    *" --load-model"*) ;;
    *) set -- "--load-model=*" "$@" ;;
esac
# vLLM and its libraries want to write to a home; the root file system may be read-only.
export HOME=/tmp
# One model that cannot be loaded leaves the others served.
exec python3 /opt/llm/health run --metrics "$address:8002" -- \
    /opt/llm/serve.sh /venv /opt/llm/work --model-repository="$repository" \
    --model-control-mode=explicit --exit-on-error=false \
    --http-address=127.0.0.1 --grpc-address="$address" --metrics-address="$address" "$@"
