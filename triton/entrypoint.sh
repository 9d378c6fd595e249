#!/bin/sh
# The container's start: serve /models on 8000 (HTTP), 8001 (gRPC) and 8002 (metrics), under the
# supervisor (health/), which restarts a server that ended or is ill. Arguments go
# to tritonserver, e.g. --load-model=demo instead of every model of the repository.
#
# TRITON_BIND_ADDRESS  address to listen on; the default is every address of the container, which
#                      only its own network and its published ports reach
set -eu

address=${TRITON_BIND_ADDRESS:-0.0.0.0}
case " $* " in
    *" --load-model"*) ;;
    *) set -- "--load-model=*" "$@" ;;
esac
# vLLM and its libraries want to write to a home; the root file system may be read-only.
export HOME=/tmp
# One model that cannot be loaded leaves the others served.
exec python3 /opt/llm/health run --http "$address:8000" --metrics "$address:8002" -- \
    /opt/llm/serve.sh /venv /opt/llm/work --model-repository=/models \
    --model-control-mode=explicit --exit-on-error=false \
    --http-address="$address" --grpc-address="$address" --metrics-address="$address" "$@"
