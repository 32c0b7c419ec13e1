"""Time that the host takes to launch a step on CUDA: by torch.compile, in pieces, as one big graph, as a CUDA graph.

    python tests/without_gpu/run.py --script launches.py [--layers 12] [--fused]

The device's kernels do nothing, and library calls (products, attention) are left out of the time: what stays is
PyTorch, Inductor's code and Triton's launches, as on any machine with a GPU. A GPT of small layers, AdamW as it is by
default or with `fused=True`; steps are timed in turns, and medians are given.
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

import device_operators
import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch._inductor.select_algorithm import extern_kernels

import memopt_compile as memopt
from memopt_compile.backends import inductor

_spec = importlib.util.spec_from_file_location(
    "example_models", Path(__file__).parents[2] / "examples" / "models.py")
models = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)

library_seconds = 0.0


def step_of(layers: int, fused: bool) -> Callable[..., Any]:
    torch.manual_seed(0)
    model = models.GPT(models.GPTConfig(65, layers, 64, 4, 32)).cuda()
    opt = torch.optim.AdamW(model.parameters(), fused=fused or None)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    step.__code__ = step.__code__.replace()
    return step


def left_out(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        global library_seconds
        began = time.perf_counter()
        result = kernel(*args, **kwargs)
        library_seconds += time.perf_counter() - began
        return result

    return torch._dynamo.disable(run)


def compiled(step: Callable[..., Any], args: tuple, **options: Any) -> tuple[Callable[..., Any], int | None]:
    """The step and the number of its pieces, after the calls that compile, tune, measure and record."""
    lowered: list[inductor.Lowered] = []
    lower = inductor.lower
    inductor.lower = lambda *given, **how: lowered.append(lower(*given, **how)) or lowered[-1]
    run = memopt.compile(step, **options) if options else torch.compile(step)
    for _ in range(4):
        run(*args)
    inductor.lower = lower
    return run, len(lowered[-1].called) if lowered else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--rounds", type=int, default=200)
    given = parser.parse_args()
    x = torch.randint(65, (2, 32), device="cuda")
    args = x, x.roll(-1, 1)
    ways = {name: compiled(step_of(given.layers, given.fused), args, **options) for name, options in {
        "torch.compile": {}, "memopt, pieces": {"cuda_graphs": False}, "memopt, CUDA graph": {"cuda_graphs": True},
        "memopt, one big graph": {"cuda_graphs": False, "pieces": False}}.items()}
    for name in ("mm", "addmm", "bmm", "baddbmm", "_mm_plus_mm"):
        setattr(extern_kernels, name, left_out(getattr(extern_kernels, name)))
    for kernel in (device_operators.efficient, device_operators.efficient_backward, device_operators.flash, device_operators.flash_backward):
        device_operators.attend(kernel, left_out(kernel))
    for calls in device_operators.graphs.values():
        calls.clear()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    global library_seconds
    for _ in range(given.rounds):
        for name, (run, _) in ways.items():
            library_seconds, began = 0.0, time.perf_counter()
            run(*args)
            seconds[name].append(time.perf_counter() - began - library_seconds)
    least = statistics.median(seconds["torch.compile"])
    print(tabulate([(name, calls, 1e3 * (median := statistics.median(seconds[name])), median / least)
                    for name, (_, calls) in ways.items()],
                   ("way", "calls of pieces", "host, ms a step", "of torch.compile"), tablefmt="github", floatfmt=".3f"))


main()
