"""What the examples share: their arguments, the one line that compiles a step, the loop."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

BACKENDS = ("memopt", "inductor", "eager")

# memopt counts bytes with torch's profiler, which announces each start and stop on stderr.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def arguments(description: str, steps: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--backend", choices=BACKENDS, default="memopt",
                        help="inductor is plain torch.compile, eager is no compiler at all")
    parser.add_argument("--lowering", choices=("inductor", "eager"), default="inductor",
                        help="how memopt runs its graph")
    parser.add_argument("--budget", metavar="SIZE", help='memopt\'s memory_budget, as "200MiB"')
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few steps of a small model")
    parser.add_argument("--compare", action="store_true",
                        help="then measure eager, torch.compile and memopt, each in a process")
    parser.add_argument("--svg", metavar="FILE", help="and draw the memory of each over one step")
    parser.add_argument("--measure", choices=BACKENDS, help=argparse.SUPPRESS)  # one such process
    return parser


def compiled(step: Any, options: argparse.Namespace) -> Any:
    """`step` as `--backend`, `--lowering` and `--budget` ask for it."""
    options.backend = options.measure or options.backend
    if options.backend == "eager":
        return step
    needs_compiler = options.backend == "inductor" or options.lowering == "inductor"
    if needs_compiler and not _has_compiler():
        if options.backend == "inductor":
            raise SystemExit("torch.compile needs a C++ compiler here: install g++ or set CXX")
        print("no C++ compiler (install g++ or set CXX): using the eager lowering", flush=True)
        options.lowering = "eager"
    if options.backend == "inductor":
        return torch.compile(step)
    wanted = {"lowering": options.lowering, "memory_budget": options.budget,
              "accumulate": getattr(options, "accumulate", "gradients"),
              "zero": getattr(options, "zero", 0)}
    return torch.compile(step, backend="memopt", options=wanted)


def _has_compiler() -> bool:
    # Loads Inductor, which eager does without.
    from memopt_compile.backends.inductor import compiler_available

    return compiler_available()


@contextlib.contextmanager
def ranks(stage: int) -> Iterator[tuple[int, Any]]:
    """(this rank, the mesh of all) of the processes that torchrun has started, of which the first
    prints; (0, None) for `stage` 0."""
    if not stage:
        yield 0, None
        return
    if "RANK" not in os.environ:
        raise SystemExit("--zero needs several processes: torchrun --nproc-per-node 2 " + " ".join(sys.argv))
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.distributed.destroy_process_group)
        if rank:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        yield rank, torch.distributed.device_mesh.init_device_mesh(
            "cpu", (torch.distributed.get_world_size(),))


def train(
    step: Callable[..., torch.Tensor],
    batch: Callable[[int], tuple],
    steps: int,
    after: Callable[[], Any] = lambda: None,
) -> None:
    """Run `step(*batch(i))` and then `after()` for i below `steps`, and show how the loss falls."""
    start, losses, every = time.perf_counter(), [], max(1, steps // 10)
    for i in range(steps):
        losses.append(float(step(*batch(i))))
        after()
        if i == 0:
            print(f"first step (compiles): {time.perf_counter() - start:.1f} s", flush=True)
            start = time.perf_counter()
        elif (i + 1) % every == 0:
            recent, pace = losses[-every:], (time.perf_counter() - start) / i
            print(f"step {i + 1:4d}/{steps}  loss {sum(recent) / len(recent):.3f}  "
                  f"{pace * 1e3:.0f} ms a step", flush=True)
    last = losses[-max(1, steps // 10):]
    print(f"loss {losses[0]:.3f} -> {sum(last) / len(last):.3f}", flush=True)
