"""Loops over the rows of logits: `for z in logits`, as TRL's losses have them, `logits.split(128)`, `logits.chunk(8, dim=1)`.

Unrolled, such a loop reads the logits piece by piece, and its gradient puts a matrix of all rows together for each piece. Rows
cannot be followed through that (`row_regions`). The rules, for the slices and selections of what has the rows of a wide product:

1. Those that are all of a dimension of the rows, of whatever lengths, are a split of it. Nodes that differ in nothing but the piece
   that they read, and treat rows one by one (`rowwise`), are a family: its whole is the operator on all rows.
2. What such nodes read besides may be another value for each piece: targets, or the gradients of rows' losses. Of all rows that is
   what these are cut of, or what is made of it in one way; else they are put together in front of the first node. A number for each
   piece is one for each of its rows.
3. The sum of a piece is that of its rows' sums, and the gradient of a piece's loss that of a loss for each target.
4. All pieces one behind the other are the whole; so is the sum of each in its place and zeros elsewhere, with what else is added
   up beside it. What else reads a piece reads these rows of the whole.

Before:  for rows i: a = f(z[i]); s = Σ a; dz = f'(z[i])·d; dz = slice_backward(dz) | dz = Σ dz
After:   a = f(z); for rows i: s = Σ a[i] | dz = f'(z)·cat(d, ..)

Memory: where z is computed in parts, less by all that is z's size; by itself it holds all pieces at once. Numbers: the same
operators on more rows, and sums in another order.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from .ordering import is_collective, is_random
from .row_splits import (
    CUTS,
    TOTAL,
    VIEWS,
    Family,
    Split,
    as_matrices,
    clash,
    cut_at,
    filled,
    form_of,
    is_number,
    nodes_of,
    operands_of,
    padded,
    shape_of,
    splits,
)
from .rowwise import ROWS, SHORT, SIZE, Rule, lead, rule
from .step_graph import OPERATOR, StepGraph, mutated_args

aten = torch.ops.aten
ROUNDS = 8  # of looking for families


def loops_joined(step: StepGraph) -> StepGraph:
    """Rules 1 to 4, in place."""
    starts: dict[fx.Node, tuple[Family, int]] = {}
    for value, split, pieces in splits(step):
        family = Family(split, value)
        starts |= {node: (family, piece) for node, piece in as_matrices(split, pieces).items()}
    if starts:
        _Families(step, starts).join()
    return step


def _firsts(step: StepGraph) -> dict[fx.Node, fx.Node]:
    """For each node the first one in the schedule that computes the same of the same."""
    firsts, known = dict[fx.Node, fx.Node](), dict[str, fx.Node]()
    for node in step.graph.nodes:
        firsts[node] = node
        if isinstance(node.target, OPERATOR) and not (mutated_args(node) or is_random(node) or is_collective(node)):
            how = str((node.target, *fx.map_arg((node.args, node.kwargs), firsts.__getitem__)))
            firsts[node] = known.setdefault(how, node)
    return firsts


class _Families:
    def __init__(self, step: StepGraph, starts: dict[fx.Node, tuple[Family, int]]):
        self.step = step
        self.of = starts  # what each node is a piece of, and which
        self.firsts = _firsts(step)
        self.families: list[Family] = []  # in the order of their first members
        self.made: dict[tuple, fx.Node | None] = {}  # of the rows of all pieces, by these
        self.done: set[fx.Node] = set()  # what is dropped if nothing reads it

    def join(self) -> None:
        self._begin()
        self._grow()
        for family in self.families:
            if self._can_be_whole(family):
                self._write(family)
        self.done.update(node for node, (family, _) in self.of.items() if family.of is not None)
        self.of = {node: found for node, found in self.of.items() if found[0].whole is not None and node not in self.done}
        for node in list(self.step.computing()):
            if node.target in (aten.cat.default, aten.stack.default):
                self._put_together(node)
        self._add_up()
        for node in reversed(list(self.step.computing())):
            if node in self.of and node.users and isinstance(node.meta["val"], Tensor):
                self.step.replace(node, self._rows_of(node, node))
            elif not node.users and (node in self.of or node in self.done or node.target in (*CUTS, *VIEWS)):
                self.step.erase(node)

    def _begin(self) -> None:
        """The wholes of slices and selections are views of what these are of."""
        for family in dict.fromkeys(family for family, _ in self.of.values()):
            trails = {family.split.trail(node, piece): node for node, (of, piece) in self.of.items() if of is family}
            if len(trails) == 1 and None not in trails:
                value, (trail,) = family.of, trails
                with self.step.graph.inserting_before(value.next):
                    family.whole = self._view(value, value, [family.split.rows, *trail])

    def _grow(self) -> None:
        """Rule 1: what is a piece if what it reads are such. Narrow rows that not all pieces have in the same way are none."""
        starts, others = dict(self.of), set[fx.Node]()
        for _ in range(ROUNDS):
            self.of, self.families = dict(starts), []
            self._grow_but(others)
            some = {family for family in self.families if len(family.members) < len(family)}
            left = {node for family in some for piece, node in family.members.items()
                    if some.isdisjoint(self.of[a][0] for a in node.all_input_nodes if a in self.of)
                    and (trail := family.split.trail(node, piece)) is not None and prod(trail) == 1}
            if not left:
                return
            others |= left

    def _grow_but(self, others: set[fx.Node]) -> None:
        known: dict[tuple, Family] = {}
        count: dict[tuple, int] = defaultdict(int)  # of what is alike, how many nodes of a piece there are so far
        for node in list(self.step.computing()):
            which = {(family.split, piece) for family, piece in (self.of[a] for a in node.all_input_nodes if a in self.of)}
            if node in self.of or node in others or len(which) != 1:
                continue
            (split, piece), = which
            node = self._plain(node, prod(split.part(piece)))
            if (how := self._rule(node, prod(split.part(piece)))) is None:
                continue
            tokens = tuple(self.of[a][0] if a in self.of else None if how.needs[a] == ROWS or is_number(node, a) else self.firsts.get(a, a)
                           for a in nodes_of(how))
            key = split, form_of(how), tokens
            count[key, piece] += 1
            if (nth := (*key, count[key, piece])) not in known:
                known[nth] = Family(split)
                self.families.append(known[nth])
            known[nth].members[piece], known[nth].rules[piece] = node, how
            self.of[node] = known[nth], piece

    def _plain(self, node: fx.Node, rows: int) -> fx.Node:
        """Rule 3: what there is in place of `node` that treats rows one by one, or `node`."""
        step = self.step
        if node.target is aten.sum.default:
            front, dims = lead(node.args[0].meta["val"], rows), len(shape_of(node.args[0]))
            if front and front < dims:
                dtype = node.meta["val"].dtype
                with step.graph.inserting_before(node):
                    each = step.call(node, aten.sum.dim_IntList, node.args[0], list(range(front, dims)),
                                     dtype=torch.float32 if dtype in SHORT else dtype)
                    if dtype in SHORT:
                        total = step.call(node, aten.sum.default, each)
                        node.target, node.args, node.kwargs = aten._to_copy.default, (total,), {"dtype": dtype}
                    else:
                        node.args, node.kwargs = (each,), {}
                return each
        elif node.target is aten.nll_loss_backward.default and node.args[4]:
            gradient, logs, targets, weight, reduction, *rest = node.args
            with step.graph.inserting_before(node):
                if reduction == 1:
                    gradient = step.call(node, aten.div.Tensor, gradient, node.args[TOTAL])
                gradient = step.call(node, aten.expand.default, gradient, [rows])
            node.args = gradient, logs, targets, weight, 0, *rest
        return node

    def _rule(self, node: fx.Node, rows: int) -> Rule | None:
        value = node.args[0] if node.args else None
        if (value in self.of and node.target in CUTS and node.meta["val"].numel() == value.meta["val"].numel()
                and (cut := cut_at(node)) and cut[0] < (lead(value.meta["val"], rows) or 0)):
            return Rule(ROWS, {value: ROWS})  # the one sample of a piece
        how = rule(node, {a: ROWS for a in node.all_input_nodes if a in self.of}, rows)
        return how if how and how.result == ROWS else None

    def _can_be_whole(self, family: Family) -> bool:
        """Whether all pieces are there, and all that the whole is made of can stand before the first."""
        if len(family.members) < len(family) or clash(family.operands):
            return False
        mine = [family.members[piece] for piece in range(len(family))]
        first = min(mine)
        return family.split.alike(mine) and all(
            self._is_there(operands[0], first) if operands[0] in self.of else
            self._can_be_before(first, operands, mine) and (family.split.alike(operands) or not family.differ(operands))
            for operands in family.operands)

    def _is_there(self, node: fx.Node, at: fx.Node) -> bool:
        """Whether `node` is a piece of a whole that is written before `at`."""
        family, _ = self.of.get(node, (None, 0))
        return family is not None and family.whole is not None and family.whole < at

    def _can_be_before(self, at: fx.Node, nodes: Iterable[fx.Node], but: Sequence[fx.Node]) -> bool:
        """Whether `nodes`, and what makes them behind `at`, can move in front of that: they write and draw nothing, and are no
        pieces of what is not written by then, nor any of `but`."""
        return all(self._is_there(n, at) or n.op == "call_function" and n not in but and (n not in self.of or self.of[n][0].whole is None)
                   and not (mutated_args(n) or is_random(n) or is_collective(n)) for n in self._behind(at, nodes))

    def _behind(self, at: fx.Node, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Those of `nodes`, and of what they are made of, that are not before `at`; pieces of what is written are not looked into."""
        found, stack = set[fx.Node](), list(nodes)
        while stack:
            if (node := stack.pop()) not in found and not node < at:
                found.add(node)
                stack += () if self._is_there(node, at) else node.all_input_nodes
        return sorted(found)

    def _move(self, at: fx.Node, nodes: Iterable[fx.Node]) -> None:
        """In front of `at`, with all that they are made of."""
        behind = self._behind(at, nodes)
        pieces = [node for node in behind if self._is_there(node, at)]
        moved = [node for node in behind if node not in pieces]
        for piece in pieces:
            read = self._rows_of(piece, at)
            for node in moved:
                node.replace_input_with(piece, read)
        for node in moved:
            at.prepend(node)

    def _write(self, family: Family) -> None:
        first = min(family.members.values())
        piece = self.of[first][1]
        wholes: dict[fx.Node, fx.Node] = {}
        for operands in family.operands:
            if operands[piece] in self.of:
                wholes[operands[piece]] = self.of[operands[piece]][0].whole
            elif family.differ(operands):
                self._move(first, operands)
                with self.step.graph.inserting_before(first):
                    numbers = [1] * len(family.split.trail(first, piece) or ())
                    wholes[operands[piece]] = self._together(first, family.split, operands, numbers)
        with self.step.graph.inserting_before(first):
            family.whole = self._on_all(first, first, family.rules[piece], family.split, wholes)

    def _together(self, like: fx.Node, split: Split, operands: tuple[fx.Node, ...], numbers: list[int]) -> fx.Node:
        """Rule 2: the rows of all pieces; of a number for each piece with dimensions `numbers`."""
        if (whole := self._made_of_all(like, split, operands)) is not None:
            return whole
        parts = []
        for piece, operand in enumerate(operands):
            shape = [*split.part(piece), *(numbers if (trail := split.trail(operand, piece)) is None else trail)]
            parts.append(self._view(like, operand, shape) if trail is not None else
                         self._call(like, aten.expand.default, self._view(like, operand, []), shape))
        joined = self._call(like, aten.cat.default, parts, split.dim)
        return self._view(like, joined, [split.rows, *shape_of(joined)[len(split.lead):]])

    def _made_of_all(self, like: fx.Node, split: Split, operands: tuple[fx.Node, ...]) -> fx.Node | None:
        """Rule 2: the rows of all pieces, if these are cut of one value, or are made of such in one way; wide ones also of what is
        put together."""
        known = self.made.get((split, operands), like)
        if known is not None and not known < like:  # not known, or only behind
            known = self.made[split, operands] = self._made(like, split, operands)
        return known

    def _made(self, like: fx.Node, split: Split, operands: tuple[fx.Node, ...]) -> fx.Node | None:
        self.done.update(operands)
        first, trail = operands[0], split.trail(operands[0], 0)
        if trail is None or not split.alike(operands):
            return None
        if (family := self._put(operands)) is not None and family.whole < like:
            return family.whole
        if len(fills := {filled(operand) for operand in operands}) == 1 and fills != {None}:
            kind = {"dtype": first.meta["val"].dtype, "device": first.meta["val"].device}
            return self._call(like, aten.full.default, [split.rows, *trail], *fills, **kind)
        if prod(trail) > 1 and None not in (numbers := [self._number(like, operand) for operand in operands]):
            each = self._view(like, self._together(like, split, tuple(numbers), []), [split.rows] + [1] * len(trail))
            return self._call(like, aten.expand.default, each, [split.rows, *trail])
        if all(operand.target in CUTS and operand.args[0] is first.args[0] for operand in operands):
            places = [(split.dim, *place) for place in split.ranges]
            same = [cut_at(operand) for operand in operands] == places and shape_of(first.args[0])[:len(split.lead)] == split.lead
            return self._view(like, first.args[0], [split.rows, *trail]) if same else None
        hows = [rule(operand, {}, prod(split.part(piece))) for piece, operand in enumerate(operands)]
        if (len({how and (how.result, form_of(how)) for how in hows}) > 1 or hows[0] is None or hows[0].result != ROWS
                or clash(operands_of(hows))):
            return None
        wholes: dict[fx.Node, fx.Node | None] = {}
        for parts in operands_of(hows):
            if hows[0].needs[parts[0]] == ROWS:
                make = functools.partial(self._together, numbers=[]) if prod(trail) > 1 else self._made_of_all
                wholes[parts[0]] = make(like, split, parts)
            elif len({self.firsts.get(part, part) for part in parts}) == 1:
                wholes[parts[0]] = parts[0]
        return self._on_all(like, first, hows[0], split, wholes) if None not in wholes.values() and len(wholes) == len(hows[0].needs) else None

    def _number(self, like: fx.Node, node: fx.Node) -> fx.Node | None:
        """The number that all of `node` is, as the gradient of a sum or a mean."""
        if node.target is aten.expand.default and node.args[0].meta["val"].numel() == 1:
            return node.args[0]
        if torch.Tag.pointwise in getattr(node.target, "tags", ()) and len(node.all_input_nodes) == 1 and not (
                is_random(node) or mutated_args(node)):
            (of,) = node.all_input_nodes
            if (number := self._number(like, of)) is not None:
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda _: number)
                return self._call(like, node.target, *args, **kwargs)
        return None

    def _on_all(self, like: fx.Node, node: fx.Node, how: Rule, split: Split, wholes: Mapping[fx.Node, fx.Node]) -> fx.Node | None:
        """What `how` says of a piece, `node`, of all rows; None if that is of another type (a number for each row counts where one for
        all does not)."""
        if how.target is None:
            return next(iter(wholes.values()))
        args, kwargs = fx.map_arg((how.args, dict(how.kwargs)), lambda a: wholes.get(a, a))
        args = [[split.rows if s is SIZE else s for s in a] if isinstance(a, list) else a for a in args]
        made = self._call(like, how.target, *args, **kwargs)
        value, expected = made.meta["val"], node.meta["val"]
        return made if not isinstance(value, Tensor) or value.dtype == expected.dtype else None

    def _call(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self.step.call(like, target, *args, **kwargs)
        self.done.add(made)
        return made

    def _view(self, like: fx.Node, value: fx.Node, shape: list[int]) -> fx.Node:
        if list(shape_of(value)) == shape:
            return value
        if not value.meta["val"].is_contiguous():
            value = self._call(like, aten.clone.default, value, memory_format=torch.contiguous_format)
        return self._call(like, aten.view.default, value, shape)

    def _rows_of(self, node: fx.Node, at: fx.Node) -> fx.Node:
        """Rule 4, what else reads a piece: that, read of its whole in front of `at`."""
        family, piece = self.of[node]
        with self.step.graph.inserting_before(at):
            rows = self._view(at, family.whole, [*family.split.lead, *shape_of(family.whole)[1:]])
            rows = self._call(at, aten.slice.Tensor, rows, family.split.dim, *family.split.ranges[piece])
            return self._view(at, rows, list(shape_of(node)))

    def _put(self, nodes: Sequence[fx.Node]) -> Family | None:
        """The family whose pieces these are, all of them in order."""
        family, _ = self.of.get(nodes[0], (None, 0))
        if family is None or family.whole is None or [self.of.get(n) for n in nodes] != [(family, i) for i in range(len(family))]:
            return None
        return family

    def _piece(self, node: Any) -> fx.Node | None:
        """The piece that `node` is, or is a view of."""
        while node is not None and node not in self.of:
            same = node.target in VIEWS and node.args[0].meta["val"].numel() == node.meta["val"].numel()
            node = node.args[0] if same else None
        return node

    def _put_together(self, node: fx.Node) -> None:
        """Rule 4, all pieces."""
        members, *dim = node.args
        if (family := self._put([self._piece(n) for n in members])) is None:
            return
        along, shape = (dim[0] if dim else 0) % len(shape_of(node)), shape_of(node)
        if along == family.split.dim and (self._is_all(node, family) or along == 0 and shape[0] == family.split.rows):
            with self.step.graph.inserting_before(node):
                self.step.replace(node, self._view(node, family.whole, list(shape)))

    def _is_all(self, node: fx.Node, family: Family) -> bool:
        """Whether `node` has all rows of a family, in their dimensions."""
        lead = family.split.lead
        return shape_of(node)[:len(lead)] == lead and prod(shape_of(node)) == prod(shape_of(family.whole))

    def _add_up(self) -> None:
        """Rule 4, sums of what is zero but for a piece."""
        sums: dict[fx.Node, tuple[dict[Family, set[int]], tuple]] = {}  # the pieces that are in a sum, and its other terms
        for node in list(self.step.computing()):
            if (placed := self._placed(node)) is not None:
                sums[node] = {placed[0]: {placed[1]}}, ()
            elif node.target is aten.add.Tensor and not node.kwargs and any(a in sums for a in node.args):
                (parts, others), (more, rest) = [sums.get(a, ({}, (a,))) for a in node.args]
                if not any(parts.get(family, set()) & which for family, which in more.items()):
                    sums[node] = {f: parts.get(f, set()) | more.get(f, set()) for f in (*parts, *more)}, (*others, *rest)
            if node not in sums:
                continue
            self.done.add(node)
            families, others = sums[node]
            if all(len(which) == len(family) for family, which in families.items()):
                with self.step.graph.inserting_before(node):
                    total, *more = *(self._view(node, family.whole, list(shape_of(node))) for family in families), *others
                    for term in more:
                        total = self.step.call(node, aten.add.Tensor, total, term)
                node.replace_all_uses_with(total)
                if node in self.step.gradients:
                    self.step.gradients.setdefault(total, self.step.gradients[node])
                del sums[node]

    def _placed(self, node: fx.Node) -> tuple[Family, int] | None:
        """The family, and which piece of it, where `node` is that in its place and zero elsewhere."""
        member, *place = padded(node) or (None,)
        family, piece = self.of.get(self._piece(member), (None, 0))
        if family is None:
            return None
        same = place == [family.split.dim, *family.split.ranges[piece]] and self._is_all(node, family)
        return (family, piece) if same else None
