"""What watching and planning again cost a training of a GPT on Shakespeare, and what comes of it.

    python tests/coverage/adapting.py [--steps 1000] [--lowering eager]

The time of a watched step beyond the median of those that are not, summed up, is the cost of watching. Steps that
plan, and the first that runs a new plan, have the median of the others' there: theirs is the cost of planning again.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from data import random_batch, shakespeare  # noqa: E402
from models import GPT, GPTConfig  # noqa: E402

import memopt_compile as memopt  # noqa: E402
from memopt_compile.planning.adaptation import Adaptive  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lowering", default="eager", choices=("eager", "inductor"))
    chosen = parser.parse_args()
    torch.manual_seed(0)
    ids, _, alphabet = shakespeare()
    model = GPT(GPTConfig(len(alphabet), 4, 128, 4, 64))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    compiled = memopt.compile(step, memory_budget=0.6, compress="int4", recompute=False, adapt=True,
                              lowering=chosen.lowering)
    generator = torch.Generator().manual_seed(0)
    settle, watched, seconds, losses = Adaptive._settle, set(), [], []

    def settling(self: Adaptive, now: dict) -> set:
        watched.add(self.calls)
        return settle(self, now)

    with mock.patch.object(Adaptive, "_settle", settling):
        for _ in range(chosen.steps):
            batch = random_batch(ids, 16, 64, generator)
            start = time.perf_counter()
            losses.append(float(compiled(*batch)))
            seconds.append(time.perf_counter() - start)
    report = memopt.report(compiled)
    usual = statistics.median(t for i, t in enumerate(seconds, 1) if i not in watched)
    planned = {after + i for after in (1, *(change.after for change in report.history)) for i in (0, 1)}
    more = [seconds[i - 1] - usual for i in watched - planned]
    rate = sum(more) + statistics.median(more) * len(watched & planned)
    print(f"{chosen.steps} steps, {len(watched)} watched ({', '.join(map(str, sorted(watched)))}); loss "
          f"{statistics.mean(losses[:20]):.3f} -> {statistics.mean(losses[-20:]):.3f}")
    print(f"watching: {rate / (usual * chosen.steps):.2%} of all steps' time; a watched step takes "
          f"{1 + statistics.median(more) / usual:.2f} times the usual one")
    print(f"planning again, {len(report.history)} times: "
          f"{sum(seconds[i - 1] - usual for i in planned - {1, 2}) / (usual * chosen.steps):.1%} of all steps' time")
    for change in report.history:
        print(" ", change)


if __name__ == "__main__":
    main()
