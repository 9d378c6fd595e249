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
# Not nvidia_pytriton.libs: it would also reach torch and vLLM.
library_path=$work/lib
# Nor a CUDA toolkit of the caller's: the wheels bring theirs. Only the NVIDIA driver's directory
# stays, where the system's linker does not search it (containers, clusters).
IFS=:
for directory in ${LD_LIBRARY_PATH:-}; do
    if [ -n "$directory" ] && [ -e "$directory/libcuda.so.1" ]; then
        library_path=$library_path:$directory
    fi
done
unset IFS
LD_LIBRARY_PATH=$library_path
LC_ALL=C.UTF-8
export PATH LD_LIBRARY_PATH LC_ALL
unset PYTHONPATH PYTHONHOME PYTHONSTARTUP

if ls "$venv"/lib/python3.*/site-packages/torch/lib/libtorch_cuda.so >/dev/null 2>&1; then
    # The GPU computes. torch threads on the CPU would only delay the engine's scheduler.
    threads=1
    # FlashInfer compiles its sampler with the machine's CUDA toolkit inside the first request that
    # samples, which takes minutes or fails. vLLM has a sampler that needs no toolkit.
    export VLLM_USE_FLASHINFER_SAMPLER="${VLLM_USE_FLASHINFER_SAMPLER:-0}"
else
    # One core stays free for Triton and the engine's scheduler: torch threads that wait for a core
    # busy elsewhere cost far more than they bring.
    cores=$(nproc)
    threads=$((cores > 2 ? cores - 1 : 1))
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$threads}"
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"

# Shared memory of a killed server or stub stays behind: name ours after this directory,
# of which one server runs at a time, and clear what the last one left.
regions=llm-triton-$(printf %s "$work" | cksum | cut -d ' ' -f 1)-
rm -f /dev/shm/"$regions"*

# Paths in model.json are relative to this directory ("models/demo/1").
cd "$work"
exec ./tritonserver --backend-directory="$work/opt/triton/backends" \
    --backend-config=python,shm-region-prefix-name="$regions" --exit-timeout-secs=10 "$@"
