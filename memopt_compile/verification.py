"""``verify=True``: the first step is also run by eager, on copies, and compared.

The shadow is the graph as Dynamo captured it, run operator by operator with autograd itself, so
it shares nothing with the passes and the lowering. It draws the same random numbers. It doubles
the memory of that one step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from .compat.trace import pytree
from .errors import NumericsError
from .records import Compilation

log = logging.getLogger("memopt_compile")
REGION = torch.ops.higher_order.tag_activation_checkpoint

# Relative to the largest entry of a tensor. Low precision and reordered sums differ by rounding;
# a wrong gradient differs by far more than ten times that.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 5e-2}


def verifying(run: Callable, captured: fx.GraphModule, record: Compilation) -> Callable:
    """`run`, with its first call compared against `captured`.

    Raises, from that call:
        NumericsError: a result or an updated tensor differs by more than rounding.
    """
    waiting = True
    run_regions_once(captured)

    def verified(*inputs: Any) -> Any:
        nonlocal waiting
        if not waiting:
            return run(*inputs)
        waiting = False
        copies = pytree.tree_map(_copy, list(inputs))
        with torch.random.fork_rng():
            expected = captured(*copies)
        results = run(*inputs)
        compare([*expected, *copies], [*results, *inputs], record)
        return results

    return verified


def regions(captured: fx.GraphModule) -> list[fx.Node]:
    """The regions of `torch.utils.checkpoint` in a graph of Dynamo's, those within others too.

    They are marks for a compiler. Run as they are, they draw other random numbers the second time.
    """
    return [node for graph in captured.modules() if isinstance(graph, fx.GraphModule)
            for node in graph.graph.find_nodes(op="call_function", target=REGION)]


def run_regions_once(captured: fx.GraphModule) -> None:
    """Let `captured`, run as it is, keep what these regions compute."""
    for node in regions(captured):
        node.target = _once
        node.graph.owning_module.recompile()


def _once(region: Callable, *inputs: Any, **settings: Any) -> Any:
    return region(*inputs)


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def compare(expected: list[Any], got: list[Any], record: Compilation) -> None:
    """Record the largest difference between two lists of values, and refuse one beyond rounding."""
    worst, allowed = 0.0, 1.0
    for a, b in zip(expected, got, strict=True):
        if isinstance(a, Tensor) and a.is_floating_point() and a.numel():
            difference = _difference(a.detach(), b.detach())
            limit = TOLERANCE.get(a.dtype, 1e-4)
            if difference / limit > worst / allowed:
                worst, allowed = difference, limit
    record.largest_difference = worst
    log.info("%s: verified against eager: largest relative difference %.2e", record.where, worst)
    lossy = record.step is not None and record.step.plan is not None and record.step.plan.largest_error
    if worst > allowed and not lossy:  # what that may do is for `shadow` to judge
        raise NumericsError(
            f"the compiled step differs from eager by {worst:.2e} relative, where rounding allows "
            f"{allowed:.0e}", where=record.where,
            do="the step has been taken: restore your checkpoint, use lowering='eager' or another "
            "backend, and report the graphs that dump= writes. Random operators draw other "
            "numbers under Inductor unless torch._inductor.config.fallback_random is set")


def _difference(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-12))
