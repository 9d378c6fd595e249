#!/bin/sh
# Run tritonserver (by exec: same process id) in a directory made by layout.sh.
#
#   serve.sh VENV WORK [tritonserver options]
#
# Needs at least --model-repository. The environment is made here because each line is a trap:
set -eu

venv=$1 work=$(cd "$2" && pwd)
shift 2

# The stub finds the virtual environment through the first python on PATH.
PATH=$venv/bin:$PATH
# libpython only: nvidia_pytriton.libs here would also reach torch and vLLM.
LD_LIBRARY_PATH=$work/lib
LC_ALL=C.UTF-8
export PATH LD_LIBRARY_PATH LC_ALL
unset PYTHONPATH PYTHONHOME PYTHONSTARTUP

# One core stays free for Triton and the engine's scheduler: torch threads that wait for a core
# busy elsewhere cost far more than they bring.
cores=$(nproc)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > 2 ? cores - 1 : 1))}"
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"

# Shared memory of a killed server or stub stays behind for ever: name ours after this directory,
# of which one server runs at a time, and clear what the last one left.
regions=llm-triton-$(printf %s "$work" | cksum | cut -d ' ' -f 1)-
rm -f /dev/shm/"$regions"*

# Paths in model.json are relative to this directory ("models/demo/1").
cd "$work"
exec ./tritonserver --backend-directory="$work/opt/triton/backends" \
    --backend-config=python,shm-region-prefix-name="$regions" --exit-timeout-secs=10 "$@"
