#!/usr/bin/env bash
# Runs the test suite; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh "test"
python -m ruff check .
python -m ruff format --check .
python -m basedpyright
exec python -m pytest -n 2 "$@"
