"""Add a convolution's bias behind it, where the convolution needs less workspace without it.

Told of a bias, oneDNN may choose another algorithm and more scratch: in one and three dimensions, and
where channels do not fill its blocks, as much as its output again. The rules:

1. A convolution in float32 or float64 whose workspace is smaller without the bias loses it, and a
   broadcast sum follows.
2. All are taken back if the predicted peak does not fall. So nothing happens where workspace is not
   known, as on CUDA.

Before:  c = convolution(x, w, b, ..)
After:   c = convolution(x, w, None, ..); v = view(b, [n, 1]); a = add(c, v)

Memory: the difference in workspace (93,312 of 349,312 bytes for a transposed 3x3x3 convolution of 16
channels of 8x8x8, batch 2, float32). Numbers: the bias is added to rounded sums, as far as the
library did not do so; in fewer bits that would show, so those are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from memopt_compile.liveness import Workspace, lifetimes, live_bytes, no_workspace
from memopt_compile.step_graph import StepGraph
from memopt_compile.step_pass import Numerics, StepPass

aten = torch.ops.aten


@dataclass(frozen=True)
class PeelBias(StepPass):
    name: ClassVar[str] = "peel_bias"
    numerics: ClassVar[Numerics] = Numerics.REORDERED

    def requires(self, step: StepGraph) -> str | None:
        return None if any(map(_has_bias, step.computing())) else "no convolution has a bias"

    def run(self, step: StepGraph, costs: Any = None) -> None:
        workspace = costs or no_workspace
        before = _peak_bytes(step, workspace)
        sums = [_peel(step, node, workspace) for node in [*step.computing()] if _has_bias(node)]
        if _peak_bytes(step, workspace) >= before:
            for total in filter(None, sums):
                _take_back(step, total)


def _has_bias(node: fx.Node) -> bool:
    return (node.target is aten.convolution.default and node.args[2] is not None
            and node.meta["val"].dtype in (torch.float32, torch.float64))


def _peel(step: StepGraph, node: fx.Node, workspace: Workspace) -> fx.Node | None:
    """Rule 1: the sum, if there is one now."""
    bias, held = node.args[2], workspace(node)
    node.update_arg(2, None)
    if workspace(node) >= held:
        node.update_arg(2, bias)
        return None
    readers, (channels, *_) = list(node.users), bias.meta["val"].shape
    with step.graph.inserting_after(node):
        column = step.call(node, aten.view.default, bias, [channels, *[1] * (node.meta["val"].dim() - 2)])
    with step.graph.inserting_after(column):
        total = step.call(node, aten.add.Tensor, node, column)
    for reader in readers:
        reader.replace_input_with(node, total)
    return total


def _take_back(step: StepGraph, total: fx.Node) -> None:
    node, column = total.args
    node.update_arg(2, column.args[0])
    step.replace(total, node)
    step.erase(column)


def _peak_bytes(step: StepGraph, workspace: Workspace) -> int:
    return max(live_bytes(list(step.computing()), lifetimes(step.graph), workspace))
