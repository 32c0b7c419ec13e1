"""Tensors whose sizes only the data tell, such as ``x[mask]``: how large each can be.

Plans and reports count such a tensor at its largest, so that the peak they give is never exceeded. An operator that
makes a size says what bounds it: positions in a mask are no more than it has elements. Where nothing bounds a size
(``repeat_interleave`` with a tensor of repeats) there is no plan, and the step is left to the ordinary path.
"""

from __future__ import annotations

import math
import operator
from itertools import zip_longest
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from .compat_breaks import WITHOUT_SIZES
from .compat_sizes import (
    GuardOnDataDependentSymNode,
    at_most,
    env_of,
    note_limit,
    polynomial,
    symbols_of_data,
)
from .errors import CaptureError
from .step_graph import OPERATOR, source_line

INDEX = torch.ops.aten.index.Tensor
PLACES = ("aten::nonzero", "aten::_unique", "aten::unique_consecutive")


class NoLimit(Exception):
    """The size that an operator at a line of the user's makes cannot be counted on."""

    def __init__(self, node: fx.Node, why: str) -> None:
        super().__init__(f"{why} that {node.target} makes")
        self.line = source_line(node)


REFUSED = (NoLimit, GuardOnDataDependentSymNode)


def refusal(error: Exception) -> tuple[str, str, str]:
    """The user's line, the reason and the remedy of what such an error stops."""
    if isinstance(error, NoLimit):
        return error.line or "", str(error), "give it its size (output_size=), or make it outside of the step"
    return "", "it depends on a size that only the data tell", WITHOUT_SIZES


def are_in(graph: fx.Graph, key: str = "example_value") -> bool:
    """Whether values of this graph, by their `key` in Dynamo's, have such sizes."""
    return any(symbols_of_data(n.meta.get(key)) for n in graph.nodes)


def makes_sizes(node: fx.Node) -> bool:
    """Whether only the data tell how large a result of `node` is, by what its operator says."""
    return isinstance(node.target, OPERATOR) and torch.Tag.dynamic_output_shape in node.target.tags and (
        node.target is not INDEX or _mask(node) is not None)


def note_limits(graph: fx.Graph) -> None:
    """Note how large the sizes are that only the data tell.

    Raises:
        NoLimit: one could be of any size, or is traced as what `keep_promises` cannot check.
    """
    known = set[Any]()
    for node in graph.nodes:
        for value in _tensors(node.meta.get("val")):
            for size in (size for size in value.shape if isinstance(size, torch.SymInt)):
                for symbol in symbols_of_data(size) - known:
                    most = _most(node) if makes_sizes(node) else None
                    if most is None:
                        raise NoLimit(node, "nothing bounds a size")
                    note_limit(symbol, env_of(size), most)
                    known.add(symbol)
                if makes_sizes(node) and not (isinstance(known_as := _promise(size), int) or known_as.isidentifier()):
                    raise NoLimit(node, f"a size is {size}")


def promises(node: fx.Node) -> tuple[int | str, ...] | None:
    """What `keep_promises` has to check of the result of `node`, None if nothing."""
    source = node.args[0] if node.target is operator.getitem else node
    value = node.meta.get("val")
    if not (isinstance(value, Tensor) and isinstance(source, fx.Node) and makes_sizes(source)):
        return None
    return tuple(map(_promise, value.shape))


def _promise(size: Any) -> int | str:
    expression = sympy.sympify(polynomial(size))
    return int(expression) if expression.is_number else str(expression)


def keep_promises(value: Tensor, shape: tuple[int | str, ...], sizes: dict[str, int]) -> None:
    """Raises CaptureError unless `value` has this shape. A symbol is the first size that it stands for, in `sizes`."""
    for size, promised in zip(value.shape, shape):
        known = sizes.setdefault(promised, size) if isinstance(promised, str) else promised
        if size != known:
            raise CaptureError(f"a tensor has {size} rows where the step was traced for as many as another has, "
                               f"{known}", do="broadcast by hand (expand), or run this step uncompiled")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (tuple, list)):
        return [tensor for each in value for tensor in _tensors(each)]
    return [value] if isinstance(value, Tensor) and value.layout is torch.strided else []


def _most(node: fx.Node) -> Any:
    """What bounds the size that `node` makes, None if nothing is known."""
    name, given = node.target._schema.name, [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args]
    if name.startswith(PLACES):
        return _elements(given[0])
    if name == "aten::unique_dim":
        return at_most(given[0].shape[given[1]])
    if name == "aten::masked_select":
        return _elements(*given[:2])
    return _elements(_mask(node)) if node.target is INDEX else None


def _mask(node: fx.Node) -> Tensor | None:
    """The first mask that `node` has as an index."""
    values = (n.meta["val"] for n in node.args[1] if n is not None)
    return next((v for v in values if v.dtype == torch.bool), None)


def _elements(*tensors: Tensor) -> Any:
    """How many elements tensors of these shapes have once they are broadcast."""
    shapes = [[at_most(size) for size in reversed(t.shape)] for t in tensors]
    return math.prod(next((s for s in sizes if s != 1), 1) for sizes in zip_longest(*shapes, fillvalue=1))
