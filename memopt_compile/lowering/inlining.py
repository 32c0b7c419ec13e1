"""The arithmetic of our operators in their place, for Inductor, which fuses it with what reads it.

The update of a parameter in few bits, or with states in few bits, is compiled by itself (`slab_kernels`).

So are casts that passes have put in: Inductor takes a `_to_copy` for decomposed already.

`memopt::quantize` stays the operator that it is, a kernel of its own that goes through the tensor a
slab at a time. Inductor would write out the formula of each operand wherever it is read; in a hash
and a dynamic map every value is read several times, and such a formula grows beyond all bounds.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ..compression import COMPRESS, DECOMPRESS, whole_parts
from ..compression import whole_value as decompressed
from ..optim.one_operator import QUANTIZED_UPDATE, QUANTIZED_UPDATE_
from ..quantization.operators import DEQUANTIZE
from ..quantization.operators import whole_value as dequantized
from ..step_graph import StepGraph
from .slab_kernels import COMPILED_UPDATE, COMPILED_UPDATE_


def _parts(form: tuple, value: Tensor) -> list[Tensor]:
    return whole_parts(value, *form)


def _decompressed(layout: tuple, *parts: Tensor) -> list[Tensor]:
    return [decompressed(parts, *layout)]


def _dequantized(layout: tuple, *parts: Tensor) -> list[Tensor]:
    return [dequantized(parts, *layout)]


def _copied(nothing: tuple, value: Tensor, **how: Any) -> list[Tensor]:
    return [CAST(value, **how)]


CAST = torch.ops.aten._to_copy.default
# By operator: its results from what follows its first argument, and the tensors that this one is.
ARITHMETIC = {COMPRESS: _parts, DECOMPRESS: _decompressed, DEQUANTIZE: _dequantized, CAST: _copied}
COMPILED = {QUANTIZED_UPDATE: COMPILED_UPDATE, QUANTIZED_UPDATE_: COMPILED_UPDATE_}


def inlined(step: StepGraph, decompositions: Mapping[Any, Any]) -> StepGraph:
    """The step, or a copy of it with arithmetic in the place of these operators."""
    if not any(node.target in ARITHMETIC or node.target in COMPILED for node in step.computing()):
        return step
    step = step.copy()
    for node in list(step.computing()):
        if node.target in COMPILED:
            node.target = COMPILED[node.target]
        if node.target not in ARITHMETIC:
            continue
        given, *rest = node.args
        made = _traced(step, node, partial(ARITHMETIC[node.target], rest, **node.kwargs),
                       [given] if isinstance(given, fx.Node) else given, decompositions)
        items = [user for user in node.users if user.target is operator.getitem]
        for item in items:
            step.replace(item, made[item.args[1]])
        if items:
            step.erase(node)
        else:
            step.replace(node, made[0])
    return step


def _traced(step: StepGraph, node: fx.Node, function: Any, reads: Sequence[fx.Node],
            decompositions: Mapping[Any, Any]) -> list[fx.Node]:
    """The results of `function` of `reads`, traced into the graph before `node`."""
    values = [n.meta["val"] for n in reads]
    with values[0].fake_mode:
        traced = make_fx(function, decomposition_table=dict(decompositions))(*values).graph
    known = dict(zip(traced.find_nodes(op="placeholder"), reads))
    for made in traced.nodes:
        if made.op == "call_function":
            with step.graph.inserting_before(node):
                known[made] = step.graph.node_copy(made, known.__getitem__)
            step.phases[known[made]] = step.phase(node)
    return [known[n] for n in traced.output_node().args[0]]
