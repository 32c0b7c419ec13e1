"""The update of one parameter is traced, and copied for all that are like it.

The loops of `torch.optim` do to each parameter what they do to the first, and to trace that by Dynamo takes as long
as a layer's forward and backward. Rules:

1. Parameters are alike if all that the loop is given of them (gradient, states) agrees in dtype, shape, strides,
   device and in which of them are one tensor or None. Numbers (a learning rate, betas) are of the whole loop.
2. The first of a kind is traced by Dynamo, in a loop of one. Of the others only nodes are copied, with what they
   read of the first replaced by what is theirs.
3. A loop over anything but plain tensors of known sizes is traced whole, as ever.

The graph is the same node by node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .. import compat
from ..compat import loop
from .update_operator import COPY_OF


def each_kind_once(trace: Callable[[list], Any], tx: Any, args: list, gaps: bool) -> Any:
    """Trace a loop over parameters: `trace` does, for the lists `args` (Dynamo's variables) or parts of them.
    With `gaps` there may be None in them, which the loop leaves there."""
    lists = [a.realize() for a in args]
    if not all(isinstance(each, compat.BaseListVariable) for each in lists):
        return trace(args)
    counts = {len(each.items) for each in lists} - {0}
    rows = [[each.items[i] for each in lists if each.items] for i in range(max(counts, default=0))]
    if len(counts) != 1 or len(rows) < 2 or not all(_plain(v, gaps) for row in rows for v in row):
        return trace(args)
    result, known, place = None, {}, len(loop.graph_of(tx).nodes)
    for row in rows:
        kind = _kind(row)
        if kind not in known:
            items = iter(row)
            with loop.added_nodes(tx) as added:
                result = trace([compat.list_variable([next(items)] if each.items else []) for each in lists])
            known[kind] = row, added
        else:
            added = _copy(tx, *known[kind], row)
        for node in added:
            node.meta[COPY_OF] = (place, kind), id(row)
    return result


def _plain(variable: Any, gaps: bool) -> bool:
    value = loop.value_behind(variable)
    if type(value) not in (torch.Tensor, torch.nn.Parameter, compat.FakeTensor):
        return gaps and value is None
    return value.layout is torch.strided and all(type(n) is int for n in (*value.shape, *value.stride()))


def _kind(row: list) -> tuple:
    """What Dynamo's trace of a loop's turn may depend on."""
    values = [loop.value_behind(variable) for variable in row]
    same = [next(i for i, other in enumerate(values) if other is value) for value in values]
    return tuple(v if v is None else (v.dtype, v.shape, v.stride(), v.device, v.requires_grad, type(v), i)
                 for v, i in zip(values, same))


def _copy(tx: Any, first: list, added: list[fx.Node], row: list) -> list[fx.Node]:
    """Copies of the nodes that were `added` for the parameter `first`, for that of `row`."""
    theirs = {node: b for a, b in zip(first, row) if (node := compat.node_of(a))}
    values, copies = {}, {}

    def read(node: fx.Node) -> fx.Node:
        if node not in theirs:
            return copies.get(node, node)
        mine = compat.node_of(theirs[node])  # an input of the graph from here on
        values[id(node.meta["example_value"])] = mine.meta["example_value"]
        return mine

    for node in added:
        copies[node] = copy = loop.graph_of(tx).node_copy(node, read)
        value = node.meta.get("example_value")  # what is in place returns its operand
        copy.meta["example_value"] = values.get(id(value), value)
    return list(copies.values())
