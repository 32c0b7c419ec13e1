"""Let what flows between convolutions lie channels-last, where that spares them their workspace.

On CPUs a convolution works on channels-last memory. Operands in the ordinary layout it copies:
in its backward the input, the incoming gradient and the outgoing one, as much again as all that
the layer keeps. Converted once at its start, a whole net stays channels-last. The rules:

1. The input of a convolution is copied into channels-last, unless it lies so already.
2. Pointwise operators, reductions, pooling, normalization and the convolutions' own backward
   follow: they are right in any layout, and their results lie as their operands do.
3. Anything else (a view, a random operator, whose numbers fall in the order of memory, what the
   step returns) gets back the contiguous layout it was traced with, from a copy.
4. The rewrite is taken back if it does not lower the predicted peak, workspace included. So it
   does nothing where workspace is not known, as on CUDA.

Before:  c = convolution(x, w); r = relu(c); v = view(r, [n, k])
After:   x' = clone(x, channels_last); c = convolution(x', w); r = relu(c); v = view(clone(r), ..)

Memory: the layers' workspace goes (6.2 of 15.4 MiB for a 3x3 convolution of 32 channels of
28x28, batch 32, float32). Numbers: the same operators; convolutions may sum in another order.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from memopt_compile.compat.trace import pytree
from memopt_compile.liveness import Workspace, lifetimes
from memopt_compile.ordering import is_random, weight
from memopt_compile.step_graph import OPERATOR, StepGraph, aliased_args
from memopt_compile.step_pass import Numerics, StepPass

aten, prims = torch.ops.aten, torch.ops.prims

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

# Right in any layout, by the start of the operator's name. What is tagged pointwise is so too.
FOLLOW = (
    "convolution", "_native_batch_norm", "native_batch_norm", "native_group_norm", "var_mean", "sum",
    "mean", "amax", "amin", "max_pool2d_with_indices", "_low_memory_max_pool", "avg_pool",
    "_adaptive_avg_pool", "adaptive_max_pool", "upsample", "cat", "clone", "_to_copy", "copy_",
    "convert_element_type", "fma", "constant_pad_nd", "full_like", "zeros_like", "ones_like",
)


@dataclass(frozen=True)
class ChannelsLast(StepPass):
    name: ClassVar[str] = "channels_last"
    numerics: ClassVar[Numerics] = Numerics.REORDERED

    def requires(self, step: StepGraph) -> str | None:
        if any(map(_convolves, step.computing())):
            return None
        return "the graph has no convolution in the ordinary layout"

    def run(self, step: StepGraph, costs: Any = None) -> None:
        before = _weight(step, costs)
        conversion = _Conversion(step)
        done = conversion.convert()
        if not done or _weight(step, costs) >= before:
            conversion.take_back()


def _weight(step: StepGraph, workspace: Workspace | None) -> tuple[int, int]:
    return weight(list(step.computing()), lifetimes(step.graph), workspace)


def _convolves(node: fx.Node) -> bool:
    """Whether rule 1 applies to `node`. Strides tell, since with a single channel `is_contiguous`
    says yes to both layouts, and the convolution then chooses the ordinary one for its result."""
    if node.target is not aten.convolution.default:
        return False
    value = node.args[0].meta["val"]
    if value.dim() not in FORMATS or not all(isinstance(n, int) for n in value.shape):
        return False
    return value.stride() != torch.empty_like(
        value, memory_format=FORMATS[value.dim()]).stride()


def _follows(node: fx.Node) -> bool:
    """Rule 2."""
    if node.target in (operator.getitem, aten.copy_.default):
        return True
    if not isinstance(node.target, OPERATOR) or is_random(node) or aliased_args(node):
        return False
    return torch.Tag.pointwise in node.target.tags or node.target.__name__.startswith(FOLLOW)


@dataclass
class _Conversion:
    """One attempt, with what it takes to undo it."""

    step: StepGraph
    was: dict[fx.Node, Any] = field(default_factory=dict)  # values before their layout changed
    copies: dict[tuple[fx.Node, torch.memory_format], fx.Node] = field(default_factory=dict)

    def convert(self) -> bool:
        """False, with the work half done, where a layout cannot be given back."""
        for node in [*self.step.computing(), self.step.graph.output_node()]:
            if _convolves(node):  # rule 1
                source = node.args[0]
                self.read_copy(node, source, FORMATS[source.meta["val"].dim()])
            elif not any(a in self.was for a in node.all_input_nodes):
                continue
            elif not _follows(node):  # rule 3
                for source in [a for a in node.all_input_nodes if a in self.was]:
                    plain = self.read_copy(node, source, torch.contiguous_format)
                    if _layout(plain.meta["val"]) != _layout(self.was[source]):
                        return False
                continue
            self.trace_again(node)
        return True

    def read_copy(self, node: fx.Node, source: fx.Node, layout: torch.memory_format) -> fx.Node:
        """Have `node` read a copy of `source` in `layout`, one for all that do."""
        if (source, layout) not in self.copies:
            with self.step.graph.inserting_before(node):
                copy = self.step.graph.call_function(
                    aten.clone.default, (source,), {"memory_format": layout})
            value = source.meta["val"]
            copy.meta = {**source.meta, "val": aten.clone.default(value, memory_format=layout)}
            self.step.phases[copy] = self.step.phase(node)
            self.copies[source, layout] = copy
        node.replace_input_with(source, self.copies[source, layout])
        return self.copies[source, layout]

    def trace_again(self, node: fx.Node) -> None:
        """The value of `node` in the layout that follows from its operands' layouts."""
        args, kwargs = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"],
                                            (tuple(node.args), dict(node.kwargs)))
        value = args[0] if node.target is aten.copy_.default else node.target(*args, **kwargs)
        if _layout(value) != _layout(node.meta["val"]):
            self.was[node] = node.meta["val"]
            node.meta = {**node.meta, "val": value}

    def take_back(self) -> None:
        for node, value in self.was.items():
            node.meta = {**node.meta, "val": value}
        for (source, _), copy in self.copies.items():
            self.step.replace(copy, source)


def _layout(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.stride(), value)
