"""Seconds of a step in micro-batches: gradients added up, or folded into Adam's moments (AdamA).

    python tests/optim/time_accumulation.py [--micro-batches 4] [--rounds 10]

The GPT of `examples/train_gpt.py` compiled by torch and by both of memopt's ways, on Inductor. Steps
take turns in one process; medians, and the median of each round's ratio to the first two.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from common import compiled  # noqa: E402
from train_gpt import parse, prepare  # noqa: E402

WAYS = {
    "torch.compile": ["--backend", "inductor"],
    "memopt, gradients": ["--accumulate", "gradients"],
    "memopt, optimizer_states": ["--accumulate", "optimizer_states"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    steps, times = {}, {name: [] for name in WAYS}
    for name, arguments in WAYS.items():
        options = parse([*arguments, "--micro-batches", str(given.micro_batches)])
        options.measure = None
        tokens = torch.randint(80, (options.batch, options.sequence))
        step = compiled(prepare(options, vocabulary=80)[-1], options)
        steps[name] = lambda step=step, tokens=tokens: step(tokens, tokens)
        for _ in range(3):
            steps[name]()
    for _ in range(given.rounds):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - begin)
    print(f"{torch.get_num_threads()} threads")
    for name, taken in times.items():
        ratios = [statistics.median(a / b for a, b in zip(taken, times[other]))
                  for other in list(WAYS)[:2]]
        print(f"{name:26} {statistics.median(taken) * 1e3:7.1f} ms   "
              + "   ".join(f"{r:.3f}" for r in ratios))


if __name__ == "__main__":
    main()
