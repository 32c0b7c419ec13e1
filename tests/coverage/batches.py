"""The largest batch within the bytes that an eager step needs for a small one, as a table.

    python tests/coverage/batches.py [--only NAME ...]

For each model of `budget.py`: eager as it is, eager with a checkpoint around every layer (both by
the measured peak of a step), and memopt with these bytes as its budget, by plans; the last is then
trained for two steps and measured. Batches are multiples of a quarter of the small one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import budget
import torch
from tabulate import tabulate
from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt_compile as memopt
from memopt_compile.fitting import fit, resized

HEAD = ("model", "bytes, MiB", "eager", "checkpoints", "memopt", "of checkpoints", "with int4", "measured, MiB")


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


def largest(peak: Callable[[int], int], unit: int, limit: int) -> int:
    """The largest multiple of `unit` whose peak is at most `limit`."""
    low, high = 0, 1
    while peak(high * unit) <= limit:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak(middle * unit) <= limit else (low, middle)
    return low * unit


def row(name: str) -> list[str]:
    step, args, _ = budget.make_step(name)
    unit, limit = args[0].shape[0] // 4, eager_peak(name, args[0].shape[0], False)
    batches = [largest(partial(eager_peak, name, checkpoints=c), unit, limit) for c in (False, True)]
    ways = []
    for compress in (None, "int4"):
        options = {"lowering": "eager", "compress": compress}
        step, args, _ = budget.make_step(name)
        found = fit(step, args, limit, multiple_of=unit, budgeted=True, progress=print, **options)
        ways.append(found.batch)
        step, args, _ = budget.make_step(name)
        compiled = memopt.compile(step, memory_budget=limit, **options)
        for _ in range(2):
            compiled(*resized(args, args[0].shape[0], found.batch))
        measured = memopt.report(compiled).measured_peak_bytes
        assert measured <= limit, (name, measured, limit)
        ways.append(measured)
    exact, first, few_bits, second = ways
    return [name, budget.mib(limit), *map(str, batches), f"{exact}", f"{exact / batches[1]:.2f}",
            f"{few_bits}", f"{budget.mib(first)}, {budget.mib(second)}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(budget.MODELS), choices=list(budget.MODELS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = []
    for name in options.only:
        table.append(row(name))
        print(tabulate(table, HEAD, tablefmt="github", disable_numparse=True), flush=True)


if __name__ == "__main__":
    main()
