#!/bin/sh
# Print the tests that `make check` runs: all unit tests, and the integration tests of what differs
# from a branch, committed or not.
#
#   changed_tests.sh [BRANCH]     the branch that the work began from (main)
#
# A file of app/ROOM/ concerns tests/integration/ROOM/, or the folder in it that mirrors the file's
# own; a file of client/ concerns tests/integration/client/; any file concerns the test file of its name; the schema (db/) concerns the tests of migrations.
set -eu

base=$(git merge-base HEAD "${1:-main}")
tests=tests/integration

changed() {
    git diff --name-only "$base"
    git ls-files --others --exclude-standard
}

# The deepest folder of integration tests that mirrors a folder of app/.
mirror() {
    folder=$1
    while [ "$folder" != . ]; do
        if [ -d "$tests/$folder" ]; then
            echo "$tests/$folder"
            return
        fi
        folder=$(dirname "$folder")
    done
}

concerned() {
    echo tests/unit
    [ ! -d client/tests ] || echo client/tests
    changed | while read -r file; do
        name=$(basename "$file" .py)
        case $file in
            app/*) mirror "$(dirname "${file#app/}")" ;;
            db/*) name=*migrations ;;
            client/*) echo "$tests/client" ;;
            "$tests"/*) name=${name#test_} ;;
        esac
        find "$tests" -name "test_$name.py"
    done
}

concerned | sort -u
