#!/usr/bin/env bash
# Train the example GPT with and without memopt, and compare. Arguments are passed on.
set -euo pipefail
cd "$(dirname "$0")"
.ci/setup examples
exec .venv/bin/python examples/train_gpt.py --compare --svg memory.svg "$@"
