"""What the examples share: their arguments, and the one line that compiles a step."""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable
from typing import Any

import torch

BACKENDS = ("memopt", "inductor", "eager")


def arguments(description: str, steps: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--backend", choices=BACKENDS, default="memopt")
    parser.add_argument("--lowering", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--budget", default=None, help='memory budget, such as "200MiB"')
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few steps of a small model")
    return parser


def compiled(step: Any, options: argparse.Namespace) -> Any:
    """`step` as `--backend` and `--lowering` ask for it."""
    if options.backend == "eager":
        return step
    lowering = options.lowering
    if lowering == "inductor" and not has_compiler():
        print("no C++ compiler: using the eager lowering", flush=True)
        if options.backend == "inductor":
            return step
        lowering = "eager"
    if options.backend == "inductor":
        return torch.compile(step)
    return torch.compile(step, backend="memopt",
                         options={"lowering": lowering, "memory_budget": options.budget})


def has_compiler() -> bool:
    """Whether Inductor can build for the CPU."""
    return any(map(shutil.which, filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))))


def train(step: Callable[..., torch.Tensor], batch: Callable[[int], tuple], steps: int,
          after: Callable[[], Any] = lambda: None) -> float:
    """Run `steps` steps, showing progress; returns the mean loss of the last tenth."""
    start, losses, every = time.perf_counter(), [], max(1, steps // 15)
    for i in range(steps):
        losses.append(float(step(*batch(i))))
        after()
        if i == 0:
            print(f"first step (with compilation): {time.perf_counter() - start:.1f} s", flush=True)
        if (i + 1) % every == 0:
            recent = losses[-every:]
            print(f"step {i + 1:5d}/{steps}  loss {sum(recent) / len(recent):.3f}", flush=True)
    last = losses[-max(1, steps // 10):]
    print(f"loss {losses[0]:.3f} -> {sum(last) / len(last):.3f}", flush=True)
    return sum(last) / len(last)
