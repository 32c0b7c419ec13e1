#!/usr/bin/env bash
# Run the tests. Arguments are passed on to pytest.
set -euo pipefail
cd "$(dirname "$0")"
.ci/setup test
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # the workers share the cores
exec .venv/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal "$@"
