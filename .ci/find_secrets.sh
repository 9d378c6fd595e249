#!/bin/sh
# Fail on a secret in what git tracks that .secrets.baseline does not know.
#
#   find_secrets.sh [PYTHON]     a Python that has detect-secrets
#
# A known one is known wherever it stands in its file. The hook would rewrite the baseline with the
# lines of today, and refuse one that is not staged: it is given a copy, and the checkout is only read.
set -eu

python=${1:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp .secrets.baseline "$work/baseline"
status=0
# Names of our files have no blanks. The baseline itself is full of hashes.
# shellcheck disable=SC2046
"$python" -m detect_secrets.pre_commit_hook --no-verify --baseline "$work/baseline" \
    $(git ls-files -- . ':!.secrets.baseline') >"$work/told" 2>&1 || status=$?
if [ "$status" -ne 0 ] && [ "$status" -ne 3 ]; then # 3: the copy was brought up to date
    cat "$work/told"
    exit 1
fi
