"""Tensors whose sizes only the data tell, such as ``x[mask]``: how large each can be.

Plans and reports count such a tensor at its largest, so that the peak they give is never exceeded. An operator that
makes a size says what bounds it: positions in a mask are no more than it has elements. Where nothing bounds a size
(``repeat_interleave`` with a tensor of repeats) there is no plan, and the step is left to the ordinary path.
"""

from __future__ import annotations

import logging
import math
import operator
from itertools import zip_longest
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from .compat.breaks import (
    WITHOUT_SIZES,
    are_sizes_of_data_in_trace,
    demands_one_graph,
    restart_without_data_sizes,
    traced_now,
)
from .compat.sizes import (
    GuardOnDataDependentSymNode,
    always,
    at_most,
    env_of,
    held_equal,
    may_be_zero,
    note_limit,
    polynomial,
    symbols_of_data,
)
from .step_graph import OPERATOR, source_line

log = logging.getLogger("memopt_compile")
aten = torch.ops.aten
INDEX, NONZERO, ASSERT = aten.index.Tensor, aten.nonzero.default, aten._assert_scalar.default
DIVISIONS = (operator.truediv, operator.floordiv, operator.mod)  # which Python refuses, where a kernel has infinity
REPEAT = aten.repeat_interleave.Tensor
VIEWS = (aten.view.default, aten._unsafe_view.default)
SQUEEZES = ("squeeze", "squeeze_", torch.squeeze, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
PLACES = ("aten::nonzero", "aten::_unique", "aten::unique_consecutive")


class Uncountable(Exception):
    """The size that an operator at a line of the user's makes cannot be counted on."""

    def __init__(self, node: fx.Node, why: str) -> None:
        super().__init__(f"{why}, of {node.target}")
        self.line = source_line(node)


REFUSED = (Uncountable, GuardOnDataDependentSymNode)


def refusal(error: Exception) -> tuple[str, str, str]:
    """The user's line, the reason and the remedy of what such an error stops."""
    if isinstance(error, Uncountable):
        return error.line or "", str(error), "give it output_size=" if str(REPEAT) in str(error) else WITHOUT_SIZES
    return "", "it depends on a size that only the data tell", WITHOUT_SIZES


def are_avoidable() -> bool:
    """Whether there are such sizes in the trace, and its graph may end at them."""
    return are_sizes_of_data_in_trace() and not demands_one_graph(traced_now())


def trace_without(where: str, why: object) -> NoReturn:
    """Have Dynamo trace the frame anew, and end its graph where only the data tell a size."""
    log.info("%s: the graph ends where only the data tell a size: %s", where, why)
    restart_without_data_sizes(traced_now(), str(why))


def are_in(graph: fx.Graph) -> bool:
    """Whether there are such sizes in this graph, also if they are taken for others."""
    return any(makes_sizes(n) or symbols_of_data(n.meta.get("val")) for n in graph.nodes)


def makes_sizes(node: fx.Node) -> bool:
    """Whether only the data tell how large a result of `node` is, by what its operator says."""
    return isinstance(node.target, OPERATOR) and torch.Tag.dynamic_output_shape in node.target.tags and (
        node.target is not INDEX or any(n is not None and n.meta["val"].dtype == torch.bool for n in node.args[1]))


def check_squeezes(module: torch.nn.Module, key: str = "example_value") -> None:
    """Raises Uncountable where a dimension goes if its size happens to be 1: no trace asserts that it does not."""
    for graph in (m.graph for m in module.modules() if isinstance(m, fx.GraphModule)):
        for node in graph.nodes:
            if node.target in SQUEEZES:
                shape = getattr(node.args[0].meta.get(key), "shape", ())
                given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
                dims = range(len(shape)) if given is None else [given] if isinstance(given, int) else given
                if shape and any(symbols_of_data(shape[d]) for d in dims):
                    raise Uncountable(node, "a dimension goes if only one is left")


def note_limits(graph: fx.Graph) -> None:
    """Note how large the sizes are that only the data tell.

    Tracing takes two sizes for one where an operator wants them equal, though eager may broadcast one of them where it
    happens to be 1; and what it assumes the graph asserts. So a step is refused that assumes anything. That something
    can be viewed in some shape is no such assumption: the view fails in eager as well.

    Raises:
        Uncountable: one could be of any size, or the trace assumes what only the data tell.
    """
    counted = dict[Any, fx.Node | None]()
    for node in graph.nodes:
        makes, sizes = makes_sizes(node), [size for tensor in _tensors(node.meta.get("val")) for size in tensor.shape
                                           if isinstance(size, torch.SymInt)]
        for size in sizes:
            for symbol in symbols_of_data(size) - counted.keys():
                if not makes:
                    raise Uncountable(node, "nothing bounds a size")
                note_limit(symbol, env_of(size), _most(node))
                counted[symbol] = _counted(node)
        if makes and not (_is_only_viewed(node) or all(_same(counted.get(polynomial(s)), _counted(node)) for s in sizes)
                          and (sizes or node.target is REPEAT)):  # which is given its size
            raise Uncountable(node, "the trace takes a size for another")
        if node.target in DIVISIONS and may_be_zero(getattr(node.args[1], "meta", {}).get("val")):
            raise Uncountable(node, "a number is divided by one that may be 0")
        if node.target is ASSERT and not always(condition := getattr(node.args[0], "meta", {}).get("val", True)):
            both = [counted.get(size) for size in held_equal(condition) or ()]
            if not both or None in both or not _same(*both):
                raise Uncountable(node, f"the trace takes it that {condition}")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (tuple, list)):
        return [tensor for each in value for tensor in _tensors(each)]
    return [value] if isinstance(value, Tensor) and value.layout is torch.strided else []


def _counted(node: fx.Node) -> fx.Node:
    """What decides how many results `node` makes, of which one tells how many are chosen."""
    if node.target is INDEX:
        return next(n for n in node.args[1] if n is not None and n.meta["val"].dtype == torch.bool)
    return node.args[0] if node.target is NONZERO else node


def _most(node: fx.Node) -> Any:
    """What bounds the size that `node` makes."""
    name, given = node.target._schema.name, [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args]
    if name.startswith(PLACES):
        return _elements(given[0])
    if name == "aten::unique_dim":
        return at_most(given[0].shape[given[1]])
    if name == "aten::masked_select":
        return _elements(*given[:2])
    if node.target is INDEX:
        return _elements(_counted(node).meta["val"])
    raise Uncountable(node, "nothing bounds a size")


def _same(a: Any, b: Any, deep: int = 8) -> bool:
    """Whether two values of the functional graph are one, by what they are computed from (``y != -100``, written twice)."""
    if isinstance(a, (list, tuple)) and type(a) is type(b) and len(a) == len(b):
        return all(_same(x, y, deep) for x, y in zip(a, b))
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
        return type(a) is type(b) and bool(a == b)
    return a is b or deep > 0 and a.op == b.op == "call_function" and a.target is b.target and isinstance(
        a.target, OPERATOR) and torch.Tag.nondeterministic_seeded not in a.target.tags and a.kwargs == b.kwargs and _same(
        a.args, b.args, deep - 1)


def _is_only_viewed(node: fx.Node) -> bool:
    return all(user.target in VIEWS for user in node.users)


def _elements(*tensors: Tensor) -> Any:
    """How many elements tensors of these shapes have once they are broadcast."""
    shapes = [[at_most(size) for size in reversed(t.shape)] for t in tensors]
    return math.prod(next((s for s in sizes if s != 1), 1) for sizes in zip_longest(*shapes, fillvalue=1))
