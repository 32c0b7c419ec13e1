"""What a CUDA graph can stand for: kernels of one device, and nothing that the host does while they run."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, fx

from .checks import REQUIRE
from .collectives import is_collective, is_wait
from .compat.trace import pytree
from .data_sizes import makes_sizes
from .finiteness import REQUIRE_FINITE
from .ordering import is_random
from .step_graph import OF_TORCH, Role, StepGraph, mutated_args, storage_roots
from .transfers import is_transfer

_ITEM = torch.ops.aten._local_scalar_dense.default
_PUTS = (torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


def obstacle(step: StepGraph, asked: bool = True, ahead: Collection[fx.Node] = ()) -> str | None:
    """Why a CUDA graph cannot stand for the step, with what to do; None if it can.

    An operator of another library may do more than launch kernels: only who has `asked` for a graph knows. What
    the nodes `ahead` compute, and the inputs among them, would be the host's business before the graph is launched.
    """
    roots = storage_roots(step.graph)
    written = {owner for n in step.graph.nodes for a in mutated_args(n) for owner in roots[a]}
    for node in step.computing():
        if node in ahead:
            continue
        if node.target in (_ITEM, REQUIRE_FINITE, REQUIRE) or is_transfer(node) or is_collective(node) or is_wait(node):
            return f"{node.target} needs the host or another device while the step runs"
        values = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
        if is_random(node) and any(v.device.type == "cpu" for v in values):
            return f"{node.target} draws on the host: draw on the device"
        if not asked and getattr(node.target, "namespace", None) not in (None, *OF_TORCH):
            return f"{node.target} is another library's: say cuda_graphs=True if it only launches kernels"
    for node, given in zip(step.placeholders, step.inputs):
        value = node.meta["val"]
        if not isinstance(value, Tensor) and node.users or not all(type(n) is int for n in getattr(value, "shape", ())):
            return f"the size of {given.label} may change from call to call: compile with dynamic=False"
        if not isinstance(value, Tensor) or node in ahead:
            continue
        if value.device.type != "cuda" and (value.dim() or node in written):
            return (f"{given.label} is on the host: move it to the device (capturable=True or fused=True does so "
                    "with an optimizer's counts of steps)")
        if given.role is Role.BATCH and node in written:
            return f"the step writes into {given.label}, which is new in every call: write into a copy"
    counted = next((n for n in step.computing() if n not in ahead and (makes_sizes(n) or _by_mask(n))), None)
    return f"{counted.target} has the host wait, to know how many elements a mask keeps" if counted else None


def _by_mask(node: fx.Node) -> bool:
    """Whether it writes to what a mask keeps. A single number of the host's is filled in where the mask says so, uncounted."""
    if node.target not in _PUTS:
        return False
    places, value, *accumulate = node.args[1:]
    number = value.meta["val"].numel() == 1 and value.meta["val"].device.type == "cpu" and not any(accumulate)
    return not number and any(p is not None and p.meta["val"].dtype == torch.bool for p in places)
