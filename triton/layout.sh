#!/bin/sh
# Lay out what tritonserver needs around a virtual environment made from these requirements.
#
#   layout.sh VENV BACKENDS WORK
#
# VENV      environment with nvidia-pytriton (requirements-light.txt, -cpu.txt or -gpu.txt)
# BACKENDS  folder of our backends (triton/backends); each is linked beside the Python backend
# WORK      directory to fill; the server runs with it as working directory (see serve.sh)
#
# Safe to repeat, also under a running server. Prints one line and exits 1 when a part is missing.
set -eu

fail() {
    echo "layout.sh: $*" >&2
    exit 1
}

[ $# -eq 3 ] || fail "usage: layout.sh VENV BACKENDS WORK"
venv=$1 backends=$(cd "$2" && pwd) work=$3

# One line each: version (3.11), site-packages, directory of the shared libpython.
facts=$("$venv/bin/python" -I -c '
import sys, sysconfig
print("%d.%d" % sys.version_info[:2])
print(sysconfig.get_path("purelib"))
print(sysconfig.get_config_var("LIBDIR"))
' 2>/dev/null) || fail "$venv is not a usable virtual environment"
version=$(echo "$facts" | sed -n 1p)
site=$(echo "$facts" | sed -n 2p)
libdir=$(echo "$facts" | sed -n 3p)

server=$site/pytriton/tritonserver
stub=$server/python_backend_stubs/$version/triton_python_backend_stub
libpython=libpython$version.so.1.0
[ -x "$server/bin/tritonserver" ] || fail "no tritonserver in $venv: install triton/requirements-light.txt"
[ -f "$stub" ] || fail "Triton's Python backend has no stub for Python $version"

# The stub links libpython, which a Python built without --enable-shared does not bring along.
found=
for dir in "$libdir" "$libdir/x86_64-linux-gnu" /usr/lib/x86_64-linux-gnu /usr/lib64 /usr/lib; do
    if [ -f "$dir/$libpython" ]; then
        found=$dir/$libpython
        break
    fi
done
[ -n "$found" ] || fail "$libpython not found: install Debian's libpython$version, or use a Python built with --enable-shared"

if [ -d "$site/vllm" ]; then
    "$venv/bin/python" -I -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
        fail "libnuma.so.1 not found, which vLLM needs: install Debian's libnuma1"
fi

# Copies go through a rename, so that a running server keeps the file it has mapped.
replace() {
    cp "$1" "$2.new"
    chmod "$3" "$2.new"
    mv -f "$2.new" "$2"
}

# The libraries' RPATH is $ORIGIN/../../../../nvidia_pytriton.libs: hence the depth of this folder.
# Triton refuses a backend library that is a link, and the stub must be executable.
python=$work/opt/triton/backends/python
mkdir -p "$python" "$work/lib"
ln -sfn "$site/nvidia_pytriton.libs" "$work/nvidia_pytriton.libs"
ln -sfn "$found" "$work/lib/$libpython"
ln -sfn "$server/bin/tritonserver" "$work/tritonserver"
replace "$server/backends/python/libtriton_python.so" "$python/libtriton_python.so" 644
replace "$stub" "$python/triton_python_backend_stub" 755
ln -sfn "$server/backends/python/triton_python_backend_utils.py" "$python/triton_python_backend_utils.py"
for backend in "$backends"/*/; do
    ln -sfn "${backend%/}" "$work/opt/triton/backends/$(basename "$backend")"
done
