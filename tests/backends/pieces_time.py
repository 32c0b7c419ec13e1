"""Time and peak of a step in pieces beside the same step as one big graph, on Inductor.

    OMP_NUM_THREADS=2 python tests/backends/pieces_time.py [--layers 4] [--rounds 40]

The GPT of the README, AdamW; both train in one process, in turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate

import memopt_compile as memopt

_spec = importlib.util.spec_from_file_location(
    "example_models", Path(__file__).parents[2] / "examples" / "models.py")
models = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)


def compiled(layers: int, pieces: bool) -> Callable[..., Any]:
    torch.manual_seed(0)
    model = models.GPT(models.GPTConfig(65, layers))
    opt = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    step.__code__ = step.__code__.replace()
    return memopt.compile(step, pieces=pieces)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    x = torch.randint(65, (16, 128))
    y, ways = x.roll(-1, 1), {}
    for name in ("pieces", "one big graph"):
        run, began = compiled(given.layers, name == "pieces"), time.perf_counter()
        run(x, y)
        ways[name] = run, time.perf_counter() - began
        losses = [float(run(x, y)) for _ in range(3)]
        print(name, losses)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.rounds):
        for name, (run, _) in ways.items():
            began = time.perf_counter()
            run(x, y)
            seconds[name].append(time.perf_counter() - began)
    whole = statistics.median(seconds["one big graph"])
    rows = [(name, report.predicted_peak_bytes / 2**20, report.measured_peak_bytes / 2**20, first,
             1e3 * statistics.median(seconds[name]), statistics.median(seconds[name]) / whole)
            for name, (run, first) in ways.items() for report in [memopt.report(run)]]
    print(tabulate(rows, ("way", "predicted MiB", "measured MiB", "first call s", "ms a step", "of one big graph"),
                   tablefmt="github", floatfmt=".3f"))


main()
