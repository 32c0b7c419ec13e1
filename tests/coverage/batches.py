"""The largest batch within the bytes that an eager step needs for a small one, as a table.

    python tests/coverage/batches.py [--only NAME ...] [--compress int4]

For each model of `budget.py`: eager with a checkpoint around every layer, by the measured peak of a
step; and memopt with these bytes as its budget, by plans, whose largest batch is then trained for two
steps and measured. Batches are multiples of a quarter of the small one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import budget
import torch
from tabulate import tabulate
from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt_compile as memopt
from memopt_compile.reporting.fitting import resized

HEAD = ("model", "bytes, MiB", "eager", "checkpoints", "memopt", "of eager", "of checkpoints", "measured, MiB",
        "added, ms")


def checkpoint_layers(model: nn.Module) -> None:
    """A checkpoint around every module of the class that is repeated in lists and sequences."""
    layers = [m for parent in model.modules() if isinstance(parent, nn.ModuleList | nn.Sequential)
              for m in parent if next(m.parameters(), None) is not None
              and next(m.children(), None) is not None]
    kinds = [type(m) for m in layers]
    repeated = max(kinds, key=kinds.count)
    for layer in (m for m in layers if type(m) is repeated):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def eager_peak(name: str, batch: int, checkpoints: bool) -> int:
    step, args, model = budget.make_step(name)
    if checkpoints:
        checkpoint_layers(model)
    args = resized(args, args[0].shape[0], batch)
    step(*args)
    return memopt.measure(step, *args).peak_bytes


def largest(peak: Callable[[int], int], unit: int, limit: int, first: int) -> int:
    """The largest multiple of `unit` whose peak is at most `limit`, tried from `first` on."""
    low, high, units = 0, None, max(1, first // unit)
    while high is None or high - low > 1:
        size = peak(units * unit)
        print(f"batch {units * unit}: {budget.mib(size)} MiB", file=sys.stderr, flush=True)
        if size <= limit:
            low = units
        else:
            high = units
        units = (low + high) // 2 if high and low else high // 2 if high else low + max(1, low // 4)
    return low * unit


def row(name: str, compress: str | None) -> list[str]:
    options: dict[str, Any] = {"lowering": "eager", "compress": compress}

    def planned_peak(batch: int) -> int:
        step, args, _ = budget.make_step(name)
        args = resized(args, args[0].shape[0], batch)
        return memopt.explain(step, *args, memory_budget=[limit], **options).points[0].peak_bytes

    step, args, _ = budget.make_step(name)
    given = args[0].shape[0]
    limit = eager_peak(name, given, False)
    checkpoints = largest(partial(eager_peak, name, checkpoints=True), given // 4, limit, given)
    ours = largest(planned_peak, given // 4, limit, checkpoints)
    step, args, _ = budget.make_step(name)
    compiled = memopt.compile(step, memory_budget=limit, **options)
    for _ in range(2):
        compiled(*resized(args, given, ours))
    report = memopt.report(compiled)
    added = 1e3 * report.plan.seconds if report.plan else 0.0
    return [name, budget.mib(limit), f"{given}", f"{checkpoints}", f"{ours}", f"{ours / given:.2f}",
            f"{ours / checkpoints:.2f}", budget.mib(report.measured_peak_bytes), f"{added:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(budget.MODELS), choices=list(budget.MODELS))
    parser.add_argument("--compress", choices=("int8", "int4", "auto"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = []
    for name in options.only:
        table.append(row(name, options.compress))
        print(tabulate(table, HEAD, tablefmt="github", disable_numparse=True), flush=True)


if __name__ == "__main__":
    main()
