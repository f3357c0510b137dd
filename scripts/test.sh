#!/usr/bin/env bash
# Runs the test suite; arguments go to pytest. Types are checked meanwhile, and what is wrong with them is printed last.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh "test,hf,data"
unset PYTHONDONTWRITEBYTECODE # else each of some two hundred processes would compile the package anew
echo "style, then types and some 5,000 tests at once, in ten to twenty minutes; the first dots come after one or two"
python -m ruff check .
python -m ruff format --check .
types=$(mktemp)
python -m basedpyright >"$types" 2>&1 &
checker=$!
trap 'kill "$checker" 2>/dev/null || true; rm -f "$types"' EXIT
code=0
python -m pytest -n 3 "$@" || code=$?
wait "$checker" || code=$?
cat "$types"
exit "$code"
