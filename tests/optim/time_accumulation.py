"""A step in micro-batches: gradients added up, or folded into Adam's moments (AdamA).

    python tests/optim/time_accumulation.py [--micro-batches 4]

Bytes and milliseconds of `examples/train_gpt.py`'s step compiled by torch and by both of memopt's
ways, on Inductor, each in a process of its own, timed in turn.
"""

import sys
from pathlib import Path

from memopt_compile.bench import compare

WAYS = {
    "torch.compile": ("--measure", "inductor"),
    "memopt, gradients": ("--measure", "memopt"),
    "memopt, optimizer_states": ("--measure", "memopt", "--accumulate", "optimizer_states"),
}

if __name__ == "__main__":
    script = Path(__file__).parents[2] / "examples/train_gpt.py"
    compare([sys.executable, str(script), "--micro-batches", "4", *sys.argv[1:]], WAYS)
