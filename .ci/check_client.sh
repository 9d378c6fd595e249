#!/bin/sh
# Build the client's wheel, check its size, and run it in a bare environment of each Python that is here.
#
#   check_client.sh [UV]
set -eu

uv=${1:-uv}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$uv" build --quiet --wheel --out-dir "$work" client
wheel=$(echo "$work"/*.whl)
size=$(wc -c <"$wheel")
[ "$size" -lt 100000 ] || { echo "the wheel has $size bytes" >&2 && exit 1; }

tried=0
for version in 3.10 3.11 3.12 3.13 3.14; do
    python=$("$uv" python find --no-python-downloads "$version" 2>/dev/null) || continue
    "$uv" venv --quiet --clear --python "$python" "$work/bare"
    "$uv" pip install --quiet --python "$work/bare/bin/python" "$wheel"
    "$work/bare/bin/llm-api" --version >/dev/null
    (cd "$work" && bare/bin/python -W error -c 'import llm_api_client; llm_api_client.Client().close()')
    echo "Python $version: installed, $size bytes"
    tried=$((tried + 1))
done
[ "$tried" -gt 0 ] || { echo "no Python of 3.10 to 3.14 was found" >&2 && exit 1; }
