"""What running an operator costs beyond its result: workspace, found by running it once.

Some operators hold memory while they run that is neither operand nor result: reordered copies
in a convolution, partial sums in a backward, an index in sorted order. No table knows them all,
so each distinct call (operator, shapes, strides, dtypes, constants) is run once on tensors of
ones under the allocation recorder, and the answer is kept for the process. Pointwise operators
and views hold nothing and are not run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from .compat_trace import hinted, pytree, real_tensors
from .liveness import Workspace, no_workspace
from .measure import measure
from .step_graph import OPERATOR, StepGraph

# What Inductor leaves to PyTorch's own kernels, by the start of the operator's name: only these
# hold workspace there. The rest becomes loops of its own.
LIBRARY = ("convolution", "_scaled_dot_product", "_convolution", "mkldnn", "_fft", "_cudnn", "miopen",
           "cudnn", "sort", "topk", "linalg", "_linalg")

_known: dict[Any, int] = {}


def workspace(step: StepGraph, lowering: str = "eager") -> Workspace:
    """For each node of `step`, the bytes that it holds while it runs beyond its result.

    Only for steps on the CPU, where running an operator needs nothing but memory; elsewhere
    every operator is taken to need none.
    """
    tensors = [v for n in step.graph.nodes for v in pytree.tree_leaves(n.meta.get("val"))
               if isinstance(v, Tensor)]
    if any(t.device.type != "cpu" for t in tensors):
        return no_workspace

    def held(node: fx.Node) -> int:
        if node.op != "call_function" or (lowering == "inductor" and not is_library(node.target)):
            return 0
        args, kwargs = pytree.tree_map_only(
            fx.Node, lambda n: n.meta.get("val"), (tuple(node.args), dict(node.kwargs)))
        return workspace_bytes(node.target, args, kwargs)

    return held


def is_library(target: Any) -> bool:
    """Whether Inductor calls PyTorch's own kernel for this operator."""
    return isinstance(target, OPERATOR) and target.__name__.startswith(LIBRARY)


def workspace_bytes(target: Any, args: Any, kwargs: Any) -> int:
    """Bytes that ``target(*args, **kwargs)`` holds while it runs beyond its result.

    Tensors among the arguments may be fake: only their shapes, strides and dtypes count.
    """
    if not isinstance(target, OPERATOR) or torch.Tag.pointwise in target.tags:
        return 0
    if any(a.alias_info is not None for a in target._schema.arguments):  # views, writes
        return 0
    if not any(isinstance(a, Tensor) for a in pytree.tree_leaves(args)):
        return 0
    key = (target, repr(pytree.tree_map(_description, (args, kwargs))))
    if key not in _known:
        _known[key] = _measure(target, args, kwargs)
    return _known[key]


def _description(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (tuple(map(hinted, value.shape)), tuple(map(hinted, value.stride())),
                str(value.dtype))
    return str(hinted(value))


def _measure(target: Any, args: Any, kwargs: Any) -> int:
    """Peak of one run on made-up operands, less the bytes of its results."""
    with real_tensors(), torch.random.fork_rng(devices=[]), torch.no_grad():
        args, kwargs = pytree.tree_map(_stand_in, (args, kwargs))
        run: Callable[[], Any] = lambda: target(*args, **kwargs)
        try:
            run()  # libraries keep what they set up in their first call
            seen = measure(run, resident=())
        except Exception:  # made-up operands may be refused: then nothing is known of it
            return 0
    return max(0, seen.transient_peak_bytes - seen.end_bytes)


def _stand_in(value: Any) -> Any:
    """A tensor like the fake one. Zeros are valid indices and valid numbers alike."""
    if not isinstance(value, Tensor):
        return hinted(value)
    elements = hinted(value.untyped_storage().nbytes()) // value.element_size()
    return torch.zeros(max(1, elements), dtype=value.dtype).as_strided(
        tuple(map(hinted, value.shape)), tuple(map(hinted, value.stride())),
        hinted(value.storage_offset()))
