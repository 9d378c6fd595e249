#!/bin/sh
# Recompile the locks of this folder from their .in files; arguments go to uv (e.g. --upgrade,
# --find-links DIR). Needs `uv` on PATH.
set -eu
cd "$(dirname "$0")"

compile() {
    uv pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_35 \
        --generate-hashes --no-emit-find-links --custom-compile-command "triton/compile.sh" "$@"
}

compile "$@" --no-deps requirements-light.in --output-file requirements-light.txt
compile "$@" --overrides overrides.txt --no-emit-package torch \
    requirements-cpu.in --output-file requirements-cpu.txt
compile "$@" --overrides overrides.txt requirements-gpu.in --output-file requirements-gpu.txt
# `==` also matches a 2.13.0+cpu where pip is configured with a source of it; `===` does not.
sed -i 's/^torch==\([0-9]\)/torch===\1/' requirements-gpu.txt
