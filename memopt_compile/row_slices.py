"""Logits of those rows alone that are read: `logits[:, :-1]`, shifted against their targets.

A product of all tokens' hidden states with a wide matrix, of which a slice of the rows is read, is the product of
the slice. As written nothing can be computed for a part of the rows from the product to the loss (`row_regions`), since
rows change their number on the way. The rules:

1. A `slice_backward` [.., V] of rows (on Inductor a `slice_scatter` into zeros), with what keeps zeros zero behind it (a
   cast, a scale, the derivative of tanh by what forward made), is read by products as rows of a matrix: those products
   read it without the zeros and the hidden states without these rows; rows that come out are padded instead. A sum over
   rows leaves zeros out.
2. A `slice` of rows of a product, with elementwise operators in between, becomes the product of the sliced hidden
   states if nothing reads the other rows. A copy into its own order, which it then has, goes.
3. Only products that are wider than their operand: the hidden states are copied without the rows, once.

Before:  z = view(mm(h, W)); s = clone(z[:, :-1]); .. | g = slice_backward(ds); dh = mm(g, Wᵀ); dW = mm(gᵀ, h)
After:   k = clone(h[:, :-1]); s = view(mm(k, W)); .. | dh = slice_backward(mm(ds, Wᵀ)); dW = mm(dsᵀ, k)

Numbers: the same products of fewer rows, whose sums leave zeros out: equal but for the order of sums. Without parts
this saves no memory, but copies: where logits are most of the peak, what reads them has as many before and behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from .ordering import is_random
from .row_splits import cut_at, shape_of
from .rowwise import PRODUCTS
from .step_graph import OPERATOR, Phase, StepGraph, mutated_args

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
PADDED = {aten.slice_backward.default: 0, aten.slice_scatter.default: 1}  # and where what they pad is
CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
TURNED = (aten.t.default, aten.permute.default)
SCALES = (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar)


def slice_first(step: StepGraph) -> StepGraph:
    """Rules 1 and 2, in place."""
    rewrite = _Rewrite(step)
    for node in list(step.computing()):
        if padded := _padded(node):
            rewrite.unpad(padded)
    for node in list(step.computing()):
        if chains := _chains(node):
            rewrite.cut(node, chains)
    return step


@dataclass(frozen=True)
class Padded:
    """Rule 1: the operators from a `slice_backward` on, and the view as a matrix that products read."""

    through: tuple[fx.Node, ...]
    matrix: fx.Node


@dataclass(frozen=True)
class Chain:
    """Rule 2: a view of a product's rows in several dimensions, what comes elementwise, and the slices of that."""

    through: tuple[fx.Node, ...]
    slices: dict[fx.Node, fx.Node]  # and the one of `through` that each is of


def _static(*nodes: fx.Node) -> bool:
    return all(type(size) is int for node in nodes for size in shape_of(node))


def _cut(node: fx.Node) -> tuple | None:
    """Dimension, begin and end of a slice of rows or of its gradient; None if it is not one."""
    if node.target is not aten.slice.Tensor and node.target not in PADDED or (found := cut_at(node)) is None:
        return None
    shape = shape_of(node.args[0] if node.target is aten.slice.Tensor else node)
    return found if 3 <= len(shape) > found[0] + 1 else None


def _is_zeros(node: fx.Node) -> bool:
    return node.target is aten.full.default and node.args[1] == 0


def _elementwise(node: fx.Node, value: fx.Node) -> bool:
    """Whether `node` is made of each number of `value` by itself, and of nothing else that is a tensor."""
    return (isinstance(node.target, OPERATOR) and shape_of(node) == shape_of(value) and node.all_input_nodes == [value]
            and (torch.Tag.pointwise in node.target.tags or node.target in CASTS)
            and not is_random(node) and not mutated_args(node))


def _keeps_zeros(node: fx.Node, value: fx.Node) -> bool:
    if node.target is aten.tanh_backward.default:
        return node.args[0] is value and node.args[1] is not value and shape_of(node.args[1]) == shape_of(value)
    return _elementwise(node, value) and (node.target in (*CASTS, aten.neg.default) or (
        node.target in SCALES and node.args[0] is value))


def _padded(node: fx.Node) -> Padded | None:
    if node.target not in PADDED or _cut(node) is None:
        return None
    through, shape = [node], shape_of(node)
    while len(through[-1].users) == 1:
        (user,) = through[-1].users
        if user.target in VIEWS and shape_of(user) == (prod(shape[:-1]), shape[-1]):
            readers = list(user.users)
            if readers and all(_product_of(r, user) for r in readers):
                return Padded(tuple(through), user)
            return None
        if not _keeps_zeros(user, through[-1]):
            return None
        through.append(user)
    return None


def _product_of(reader: fx.Node, matrix: fx.Node) -> str | None:
    """How `reader` reads the rows of `matrix`, wide as it is: "rows", "columns", "sum"; None for another way."""
    width = shape_of(matrix)[1]
    if reader.target is aten.mm.default and reader.args[0] is matrix and reader.args[1] is not matrix:
        return "rows" if _static(reader) and shape_of(reader)[1] < width else None
    if reader.target in TURNED and shape_of(reader) == shape_of(matrix)[::-1] and reader.args[1:] in ((), ([1, 0],)):
        alike = reader.users and all(u.target is aten.mm.default and u.args[0] is reader and u.args[1] is not reader
                                     and _static(u) and shape_of(u)[1] < width for u in reader.users)
        return "columns" if alike else None
    if reader.target is aten.sum.dim_IntList and list(reader.args[1]) == [0]:
        return "sum"
    return None


def _chains(product: fx.Node) -> list[Chain]:
    """All that reads a product, if only the same slice of its rows is read. (What is computed again has a view of its own.)"""
    if product.target not in PRODUCTS or not product.users:
        return []
    left = product.args[PRODUCTS[product.target]]
    if not _static(product, left, *product.users):  # first: a symbolic size has no hash
        return []
    shapes = {shape_of(view) if view.target in VIEWS else None for view in product.users}
    if len(shapes) > 1 or None in shapes:
        return []
    (shape,) = shapes
    if len(shape) < 3 or shape[-1] != shape_of(product)[1] or shape[-1] <= shape_of(left)[1]:
        return []
    if product.target is aten.addmm.default and (product.kwargs or shape_of(product.args[0]) != shape[-1:]):
        return []
    found = [_chain(view) for view in product.users]
    cuts = {_cut(each) for chain in found if chain for each in chain.slices}
    return found if all(found) and len(cuts) == 1 and None not in cuts else []


def _chain(view: fx.Node) -> Chain | None:
    through, slices = [view], {}
    while True:
        above: list[fx.Node] = []
        for user in through[-1].users:
            if user.target is aten.slice.Tensor and user.args[0] is through[-1]:
                slices[user] = through[-1]
            else:
                above.append(user)
        if not above:
            return Chain(tuple(through), slices)
        if len(above) > 1 or not _elementwise(above[0], through[-1]):
            return None
        through.append(above[0])


class _Rewrite:
    def __init__(self, step: StepGraph):
        self.step = step
        self.kept: dict[tuple, fx.Node] = {}  # the hidden states without the rows, as a matrix

    def unpad(self, padded: Padded) -> None:
        """Rule 1."""
        step, (start, *rest), matrix = self.step, padded.through, padded.matrix
        cut, shape = _cut(start), shape_of(start)
        with step.graph.inserting_before(matrix):
            value = start.args[PADDED[start.target]]
            for node in rest:
                others = [step.call(node, aten.slice.Tensor, a, *cut) if isinstance(a, fx.Node) else a for a in node.args[1:]]
                value = step.call(node, node.target, value, *others, **node.kwargs)
            value = self._matrix(matrix, value)
        for reader in list(matrix.users):
            how = _product_of(reader, matrix)
            if how == "rows":
                with step.graph.inserting_before(reader):
                    made = step.call(reader, reader.target, value, reader.args[1])
                    less = [*shape_of(start.args[PADDED[start.target]])[:-1], shape_of(reader)[1]]
                    made = self._pad(reader, start, step.call(reader, aten.view.default, made, less))
                    made = step.call(reader, aten.view.default, made, list(shape_of(reader)))
                step.replace(reader, made)
            elif how == "columns":
                for product in list(reader.users):
                    kept = self._kept(product.args[1], shape[:-1], cut, product)
                    with step.graph.inserting_before(product):
                        turned = step.call(reader, reader.target, value, *reader.args[1:])
                        made = step.call(product, product.target, turned, kept)
                    step.replace(product, made)
                step.erase(reader)
            else:
                reader.replace_input_with(matrix, value)
        zeros = start.args[:1] if start.target is aten.slice_scatter.default else ()
        for node in (matrix, *reversed(padded.through), *zeros):
            if not node.users:
                step.erase(node)

    def _pad(self, like: fx.Node, start: fx.Node, value: fx.Node) -> fx.Node:
        """`value` with zeros for the rows that `start` has zeros for."""
        shape, cut = [*shape_of(start)[:-1], shape_of(value)[-1]], _cut(start)
        if start.target is aten.slice_backward.default:
            return self.step.call(like, start.target, value, shape, *cut, 1)
        zeros = self.step.graph.node_copy(start.args[0])
        zeros.args, zeros.kwargs = (shape, 0), {**zeros.kwargs, "dtype": value.meta["val"].dtype}
        zeros.meta["val"] = value.meta["val"].new_zeros(shape)
        self.step.phases[zeros] = self.step.phase(like)
        return self.step.call(like, start.target, zeros, value, *cut)

    def cut(self, product: fx.Node, chains: list[Chain]) -> None:
        """Rule 2."""
        step, position = self.step, PRODUCTS[product.target]
        cut, shape = _cut(next(iter(chains[0].slices))), list(shape_of(chains[0].through[0]))
        args = list(product.args)
        args[position] = self._kept(args[position], tuple(shape[:-1]), cut, product)
        with step.graph.inserting_before(product):
            made = step.call(product, product.target, *args, **product.kwargs)
        shape[cut[0]] = cut[2] - cut[1]
        for chain in chains:
            view, *rest = chain.through
            with step.graph.inserting_before(view):
                cuts = {view: step.call(view, aten.view.default, made, shape)}
            for node in rest:
                given = [cuts.get(a, a) if isinstance(a, fx.Node) else a for a in node.args]
                with step.graph.inserting_before(node):
                    cuts[node] = step.call(node, node.target, *given, **node.kwargs)
            for node, of in chain.slices.items():
                if len(node.users) == 1 and _copies(copy := next(iter(node.users))):
                    step.replace(copy, cuts[of])
                step.replace(node, cuts[of])
            for node in reversed(chain.through):
                step.erase(node)
        step.erase(product)

    def _kept(self, hidden: fx.Node, lead: tuple, cut: tuple, reader: fx.Node) -> fx.Node:
        """`hidden` [N, D] with rows `lead`, without those that are cut off; made in front of its first reader in forward."""
        key = hidden, lead, cut
        if key not in self.kept:
            forward = [n for n in hidden.users if n.target in PRODUCTS and self.step.phase(n) is Phase.FORWARD]
            at = min([*forward, reader]) if forward else reader
            with self.step.graph.inserting_before(at):
                rows = self.step.call(at, aten.view.default, hidden, [*lead, shape_of(hidden)[1]])
                rows = self.step.call(at, aten.slice.Tensor, rows, *cut)
                self.kept[key] = self._matrix(at, rows)
        return self.kept[key]

    def _matrix(self, like: fx.Node, value: fx.Node) -> fx.Node:
        """`value` [.., D] as a matrix of its rows, copied where it has to be."""
        if value.target in VIEWS and shape_of(value.args[0]) == (prod(shape_of(value)[:-1]), shape_of(value)[-1]):
            return value.args[0]
        if not value.meta["val"].is_contiguous():
            value = self.step.call(like, aten.clone.default, value, memory_format=torch.contiguous_format)
        return self.step.call(like, aten.view.default, value, [prod(shape_of(value)[:-1]), shape_of(value)[-1]])


def _copies(node: fx.Node) -> bool:
    return node.target is aten.clone.default and node.kwargs.get("memory_format") in (None, torch.contiguous_format, torch.preserve_format)
