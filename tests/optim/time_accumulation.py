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
from types import FunctionType

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


def own_code(step: FunctionType, name: str) -> FunctionType:
    """`step` with a code object that Dynamo does not know: the loop in which torch.compile breaks the
    graph is not traced again under any backend."""
    return FunctionType(step.__code__.replace(co_name=name), step.__globals__, name,
                        step.__defaults__, step.__closure__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    steps, times = {}, {name: [] for name in WAYS}
    for number, (name, arguments) in enumerate(WAYS.items()):
        options = parse([*arguments, "--micro-batches", str(given.micro_batches)])
        options.measure = None
        tokens = torch.randint(80, (options.batch, options.sequence))
        step = compiled(own_code(prepare(options, vocabulary=80)[-1], f"step_{number}"), options)
        steps[name] = lambda step=step, tokens=tokens: step(tokens, tokens)
        for _ in range(3):
            steps[name]()
    for _ in range(given.rounds):
        for name in WAYS:
            begin = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - begin)
    print(f"{torch.get_num_threads()} threads")
    for name, taken in times.items():
        ratios = [statistics.median(a / b for a, b in zip(taken, times[other]))
                  for other in list(WAYS)[:2]]
        print(f"{name:26} {statistics.median(taken) * 1e3:7.1f} ms   "
              + "   ".join(f"{r:.3f}" for r in ratios))


if __name__ == "__main__":
    main()
