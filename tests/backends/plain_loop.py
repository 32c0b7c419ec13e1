"""What Inductor has to compile where a plain Python loop goes over micro-batches, by their number.

    python tests/backends/plain_loop.py [--layers 4]

The loop is traced whole, so the step grows with the micro-batches; the pieces that are compiled are shared.
Seconds are Inductor's, its caches off.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

import memopt_compile as memopt
from memopt_compile.backends import inductor

_spec = importlib.util.spec_from_file_location(
    "example_models", Path(__file__).parents[2] / "examples" / "models.py")
models = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)


def compiled(layers: int, micro_batches: int) -> tuple[int, int, int, int, float]:
    """Calls of pieces, distinct ones, operators in all calls, in the distinct ones, Inductor's seconds."""
    torch.manual_seed(0)
    model = models.GPT(models.GPTConfig(65, layers))
    opt = torch.optim.AdamW(model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        for a, b in zip(x.chunk(micro_batches), y.chunk(micro_batches)):
            loss = F.cross_entropy(model(a).flatten(0, 1), b.flatten())
            (loss / micro_batches).backward()
        opt.step()
        return loss.detach()

    made: list[Any] = []
    seconds = 0.0
    pieces, compile_graph = inductor.pieces, inductor.compat_inductor.compile_graph

    def cut(given: Any) -> list:
        made.extend(pieces(given))
        return list(made)

    def timed(*args: Any, **more: Any) -> Any:
        nonlocal seconds
        began = time.perf_counter()
        try:
            return compile_graph(*args, **more)
        finally:
            seconds += time.perf_counter() - began

    inductor.forget()
    x = torch.randint(65, (16, 128))
    with (mock.patch.object(inductor, "pieces", cut), torch._inductor.config.patch(force_disable_caches=True),
          mock.patch.object(inductor.compat_inductor, "compile_graph", timed)):
        memopt.compile(step)(x, x.roll(-1, 1))
    sizes = {part.key: sum(n.op == "call_function" for n in part.graph.nodes) for part in made}
    return len(made), len(sizes), sum(sizes[part.key] for part in made), sum(sizes.values()), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    layers = parser.parse_args().layers
    rows = [(n, *compiled(layers, n)) for n in (1, 2, 4, 8, 16)]
    print(tabulate(rows, ("micro-batches", "calls of pieces", "distinct", "operators", "in distinct pieces",
                          "Inductor s"), tablefmt="github", floatfmt=".1f"))


if __name__ == "__main__":
    main()
