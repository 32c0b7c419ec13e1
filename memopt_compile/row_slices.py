"""Logits of those rows alone that are read: `logits[:, :-1]`, shifted against their targets.

A product of all tokens' hidden states with a wide matrix, of which a slice of the rows is read, is the product of
the slice. As written nothing can be computed for a part of the rows from the product to the loss (`row_regions`), since
rows change their number on the way. The rules:

1. A gradient [.., V] of rows beside zeros (`slice_backward`, on Inductor a `slice_scatter`) leaves zeros in the same rows of
   what is made of it row by row (`rowwise.rule`) by operators that keep zeros (a cast, a scale, the gradient of a softmax).
   All this is computed without these rows, up to sums over rows (zeros add nothing) and products back to narrow rows,
   which are padded instead.
2. Of a product of which the same slice of rows is read alone, with what is made row by row in between, these rows are
   computed. A copy of the slice into its own order, which it then has, goes.
3. Only products that are wider than their operand: the hidden states are copied without the rows, once.

Before:  z = mm(h, W); p = log_softmax(z); s = p[:, :-1]; .. | g = slice_backward(ds); dz = g - exp(p)·sum(g); dh = mm(dz, Wᵀ)
After:   k = clone(h[:, :-1]); z = mm(k, W); s = log_softmax(z); .. | dz = ds - exp(s)·sum(ds); dh = slice_backward(mm(dz, Wᵀ))

Numbers: the same products of fewer rows, whose sums leave zeros out: equal but for the order of sums. Without parts
this saves no memory, but copies: where logits are most of the peak, what reads them has as many before and behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import prod
from typing import Any

import torch
from torch import fx

from .row_regions import is_wide, left_of
from .row_splits import cut_at, filled, shape_of
from .rowwise import COLUMNS, PRODUCTS, ROWS, SUM, WHOLE, Rule, lead, rule, sized, width
from .step_graph import OPERATOR, Phase, StepGraph

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
PADDED = {aten.slice_backward.default: 0, aten.slice_scatter.default: 1}  # and where what they pad is
# Zero where their first operand is, where one is, and where all are.
BY_FIRST = {"aten::view", "aten::_unsafe_view", "aten::reshape", "aten::expand", "aten::clone", "aten::_to_copy", "aten::neg",
            "prims::convert_element_type", "aten::div", "aten::sum", "aten::t", "aten::permute", "aten::squeeze", "aten::unsqueeze",
            "aten::_log_softmax_backward_data", "aten::_softmax_backward_data", "aten::masked_fill"}
BY_ONE = {"aten::mul", "aten::mm"}
BY_ALL = {"aten::add", "aten::sub"}
DEEPEST = 32  # operators from a gradient beside zeros to where others are added


def slice_first(step: StepGraph) -> StepGraph:
    """Rules 1 and 2, in place."""
    kept = dict[tuple, fx.Node]()
    for node in list(step.computing()):
        if not node._erased and node.target in PADDED and (cut := _cut(node, len(shape_of(node)) - 1)) and (
                found := _through_zeros({node}, cut)):
            _unpad(step, node, found, _Rows(step, cut, kept))
    for node in list(step.computing()):
        if node.target in PRODUCTS and is_wide(node) and (found := _through_slices(node)):
            _cut_first(step, found, _Rows(step, found.cut, kept))
    return step


@dataclass(frozen=True)
class Cut:
    """Of rows [*lead] those from `begin` to `end` of dimension `dim`."""

    lead: tuple[int, ...]
    dim: int
    begin: int
    end: int

    @property
    def at(self) -> tuple[int, int, int]:
        return self.dim, self.begin, self.end

    @property
    def left(self) -> list[int]:
        return [*self.lead[:self.dim], self.end - self.begin, *self.lead[self.dim + 1:]]


@dataclass
class Found:
    """What is computed row by row of `starts`, and of it the values that are read otherwise: padded (rule 1), or slices (rule 2)."""

    cut: Cut
    starts: set[fx.Node]
    rules: dict[fx.Node, Rule]
    ends: dict[fx.Node, None]


def _cut(node: fx.Node, front: int | None) -> Cut | None:
    """Of a slice of rows, or of its gradient beside zeros, the rows being the dimensions to `front`; None if it is not one."""
    if node.target is not aten.slice.Tensor and node.target not in PADDED or (found := cut_at(node)) is None:
        return None
    shape = shape_of(node.args[0] if node.target is aten.slice.Tensor else node)
    return Cut(shape[:front], *found) if front is not None and front > 1 and found[0] < front else None


def _follow(starts: Iterable[fx.Node], rows: int,
            take: Callable[[fx.Node, Rule | None, list[fx.Node]], str | None]) -> dict[fx.Node, Rule] | None:
    """The rules of what comes of `starts` row by row, in schedule order. `take` says of each reader whether it is followed
    ("through"), is the last ("end"), is no part of it ("outside"), or that nothing can be done (None)."""
    rules, known = dict[fx.Node, Rule](), dict.fromkeys(starts, ROWS)
    waiting, seen = [user for start in starts for user in start.users], set[fx.Node]()
    heapify(waiting)
    while waiting:
        if (node := heappop(waiting)) in seen:
            continue
        seen.add(node)
        how = rule(node, known, rows)
        match take(node, how, [a for a in node.all_input_nodes if a in known]):
            case "through":
                rules[node], known[node] = how, how.result
                for user in node.users:
                    heappush(waiting, user)
            case "end":
                rules[node] = how
            case None:
                return None
    return rules


def _through_zeros(starts: set[fx.Node], cut: Cut) -> Found | None:
    """Rule 1: what has zeros where `starts` have, with other gradients beside such zeros that it is added to."""
    rows, wide = prod(cut.lead), max(shape_of(start)[-1] for start in starts)
    zero, more, ends, products = set(starts), set[fx.Node](), dict[fx.Node, None](), list[fx.Node]()
    known: dict[fx.Node, set[fx.Node] | None] = {}

    def is_zero(value: Any) -> bool:
        beside = set() if value in zero else _zeros_of(value, cut, known)
        more.update(beside or ())
        return beside is not None

    def take(node: fx.Node, how: Rule | None, mine: list[fx.Node]) -> str | None:
        if how is None or not _keeps_zeros(node, is_zero):
            ends.update(dict.fromkeys(a for a in mine if a not in starts))
            return "outside" if all(width(a.meta["val"], rows) < wide for a in mine) else None
        if node.target not in PRODUCTS:
            zero.add(node)
            return "end" if how.result == SUM else "through"
        products.append(node)
        if how.result == ROWS:
            ends[node] = None
        return "end" if shape_of(node)[1] < wide else None

    rules = _follow(starts, rows, take)
    if rules is None or not products:
        return None
    return Found(cut, starts, rules, ends) if more <= starts else _through_zeros(starts | more, cut)


def _zeros_of(value: Any, cut: Cut, known: dict[fx.Node, set[fx.Node] | None], depth: int = DEEPEST) -> set[fx.Node] | None:
    """The gradients beside zeros that make the rows of `value` zero which are not of `cut`; None if they are not."""
    if not isinstance(value, fx.Node) or not isinstance(value.meta.get("val"), torch.Tensor):
        return None
    if value not in known:
        front, beside = lead(value.meta["val"], prod(cut.lead)), set[fx.Node]()

        def is_zero(operand: Any) -> bool:
            more = _zeros_of(operand, cut, known, depth - 1)
            beside.update(more or ())
            return more is not None

        if value.target in PADDED and _cut(value, front) == cut:
            beside = {value}
        elif filled(value) != 0 and not (front is not None and depth and _keeps_zeros(value, is_zero)):
            beside = None
        known[value] = beside
    return known[value]


def _keeps_zeros(node: fx.Node, is_zero: Callable[[Any], bool]) -> bool:
    name, given = node.target._schema.name if isinstance(node.target, OPERATOR) else "", node.args[:2]
    if name in BY_FIRST:
        return is_zero(given[0]) and (name != "aten::masked_fill" or node.args[2] == 0)
    if name == "prims::fma":  # a·b + c
        return is_zero(node.args[2]) and any(map(is_zero, given))
    if name == "aten::where":
        return all(map(is_zero, node.args[1:]))
    if name.endswith("_backward") and torch.Tag.pointwise in node.target.tags:  # a gradient times a derivative
        return is_zero(given[0])
    return name in BY_ONE and any(map(is_zero, given)) or name in BY_ALL and all(map(is_zero, given))


def _through_slices(product: fx.Node) -> Found | None:
    """Rule 2: what lies between `product` and the slices, if nothing else is read."""
    rows, wide = shape_of(product)
    slices, cuts = dict[fx.Node, None](), set[Cut | None]()

    def take(node: fx.Node, how: Rule | None, mine: list[fx.Node]) -> str | None:
        if node.target is aten.slice.Tensor and (cut := _cut(node, lead(mine[0].meta["val"], rows))):
            slices[node] = None
            cuts.add(cut)
            return "outside" if len(cuts) == 1 else None
        return "through" if how is not None and how.result == ROWS and node.target not in PRODUCTS else None

    rules, first = _follow([product], rows, take), rule(product, {left_of(product): ROWS}, rows)
    if rules is None or first is None or not any(shape_of(s)[-1] == wide for s in slices):
        return None
    return Found(*cuts, {product}, {product: first, **rules}, slices)


class _Rows:
    """Computes what is row by row on the rows of a cut: [n, ..]."""

    def __init__(self, step: StepGraph, cut: Cut, kept: dict[tuple, fx.Node]):
        self.step, self.cut, self.kept = step, cut, kept
        self.made: dict[fx.Node, fx.Node] = {}

    def compute(self, rules: dict[fx.Node, Rule]) -> None:
        for node, how in rules.items():
            with self.step.graph.inserting_before(node):
                given = {value: self._operand(node, value, need) for value, need in how.needs.items()}
                if how.target is None:
                    (self.made[node],) = given.values()
                else:
                    args = sized(fx.map_arg(how.args, given.__getitem__), prod(self.cut.left))
                    self.made[node] = self.step.call(node, how.target, *args, **how.kwargs)

    def _operand(self, reader: fx.Node, value: fx.Node, need: str) -> fx.Node:
        if need == WHOLE or value in self.made:
            return self.made.get(value, value)
        if need == COLUMNS:
            turned = value.args[0] if _is_turned(value) else self.step.call(value, aten.t.default, value)
            return self.step.call(value, aten.t.default, self._operand(reader, turned, ROWS))
        return self._kept(reader, value)

    def _kept(self, reader: fx.Node, value: fx.Node) -> fx.Node:
        """`value` without the rows that are cut off; hidden states in front of the first product in forward that reads them."""
        if (value, self.cut) not in self.kept or reader < self.kept[value, self.cut]:
            forward = [n for n in value.users if n.target in PRODUCTS and self.step.phase(n) is Phase.FORWARD]
            at = min([*forward, reader])
            with self.step.graph.inserting_before(at):
                behind = value.meta["val"].shape[lead(value.meta["val"], prod(self.cut.lead)):]
                rows = self.step.call(at, aten.view.default, value, [*self.cut.lead, *behind])
                self.kept[value, self.cut] = self.matrix(at, self.step.call(at, aten.slice.Tensor, rows, *self.cut.at))
        return self.kept[value, self.cut]

    def matrix(self, like: fx.Node, value: fx.Node) -> fx.Node:
        """`value` [*left, ..] with one dimension of rows, copied where it has to be."""
        count = prod(self.cut.left)
        shape = [count, *shape_of(value)[len(self.cut.lead):]]
        if value.target in VIEWS and list(shape_of(value.args[0])) == shape:
            return value.args[0]
        if not value.meta["val"].is_contiguous():
            value = self.step.call(like, aten.clone.default, value, memory_format=torch.contiguous_format)
        return self.step.call(like, aten.view.default, value, shape)

    def shaped(self, like: fx.Node, value: fx.Node) -> fx.Node:
        """The matrix `value` as [*left, ..]."""
        return self.step.call(like, aten.view.default, value, [*self.cut.left, *shape_of(value)[1:]])


def _unpad(step: StepGraph, start: fx.Node, found: Found, rows: _Rows) -> None:
    """Rule 1."""
    for each in found.starts:
        with step.graph.inserting_before(each):
            rows.made[each] = rows.matrix(each, each.args[PADDED[each.target]])
    rows.compute(found.rules)
    for node, how in found.rules.items():
        if how.result == SUM:
            step.replace(node, rows.made[node])
    for node in found.ends:
        with step.graph.inserting_before(node):
            value, shape = rows.shaped(node, rows.made[node]), [*rows.cut.lead, *shape_of(rows.made[node])[1:]]
            if PADDED[start.target] == 0:
                value = step.call(node, start.target, value, shape, *rows.cut.at, 1)
            else:
                zeros = step.graph.node_copy(start.args[0])
                zeros.args, zeros.kwargs = (shape, 0), {**zeros.kwargs, "dtype": value.meta["val"].dtype}
                zeros.meta["val"], step.phases[zeros] = value.meta["val"].new_zeros(shape), step.phase(node)
                value = step.call(node, start.target, zeros, value, *rows.cut.at)
            if shape != list(shape_of(node)):
                value = step.call(node, aten.view.default, value, list(shape_of(node)))
        step.replace(node, value)
    _erase_unread(step, [*(each.args[0] for each in found.starts if PADDED[each.target]), *found.starts, *found.rules])


def _cut_first(step: StepGraph, found: Found, rows: _Rows) -> None:
    """Rule 2."""
    rows.compute(found.rules)
    for node in found.ends:
        with step.graph.inserting_before(node):
            made = rows.shaped(node, rows.made[node.args[0]])
        if len(node.users) == 1 and _copies(copy := next(iter(node.users))):
            step.replace(copy, made)
        step.replace(node, made)
    _erase_unread(step, found.rules)


def _erase_unread(step: StepGraph, nodes: Iterable[fx.Node]) -> None:
    for node in reversed([*nodes]):
        if not node._erased and not node.users:
            step.erase(node)


def _is_turned(matrix: fx.Node) -> bool:
    return matrix.target is aten.t.default or matrix.target is aten.permute.default and [d % 2 for d in matrix.args[1]] == [1, 0]


def _copies(node: fx.Node) -> bool:
    return node.target is aten.clone.default and node.kwargs.get("memory_format") in (None, torch.contiguous_format, torch.preserve_format)
