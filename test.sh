#!/usr/bin/env bash
# Run the tests. Arguments are passed on to pytest.
set -euo pipefail
cd "$(dirname "$0")"
.ci/setup test
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # the workers share the cores
# One more than cores, at most 4: some tests wait for processes of their own.
workers=$(.venv/bin/python -c "import os; print(min(4, 1 + (os.cpu_count() or 1)))")
exec .venv/bin/python -m pytest -n "$workers" --dist worksteal "$@"
