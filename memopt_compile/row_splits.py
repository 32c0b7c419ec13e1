"""Pieces of rows: where values are cut into them, where they are put beside zeros, and what is alike of all pieces (`row_loops`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from .row_regions import is_wide
from .rowwise import PRODUCTS, ROWS, Rule, lead
from .step_graph import StepGraph

aten = torch.ops.aten
CUTS = (aten.slice.Tensor, aten.select.int)
PADDED = {aten.slice_backward.default: 0, aten.select_backward.default: 0,  # and where what they pad is
          aten.slice_scatter.default: 1, aten.select_scatter.default: 1}
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default)  # or copies in another order
TOTAL = 6  # the argument of `nll_loss_backward` that a loss for each target has no use for


@dataclass(frozen=True)
class Split:
    """Rows [*lead], of which dimension `dim` is cut at `ranges`, one behind the other."""

    lead: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def rows(self) -> int:
        return prod(self.lead)

    def part(self, piece: int) -> list[int]:
        """The piece's rows, in the dimensions of all."""
        begin, end = self.ranges[piece]
        return [*self.lead[:self.dim], end - begin, *self.lead[self.dim + 1:]]

    def trail(self, node: fx.Node, piece: int) -> tuple[int, ...] | None:
        """The dimensions of a piece behind its rows; None without such, or for several results."""
        front = lead(value := node.meta["val"], prod(self.part(piece)))
        return None if front is None else tuple(value.shape[front:])

    def alike(self, nodes: Sequence[fx.Node]) -> bool:
        """Whether these, one for each piece, differ in nothing but their rows."""
        kinds = {(self.trail(node, piece), getattr(node.meta["val"], "dtype", None)) for piece, node in enumerate(nodes)}
        return len(kinds) == 1


@dataclass(eq=False)
class Family:
    """Pieces of one value, which is to be `whole` [rows, ..]: slices and selections `of` it, or `members` that come of such by `rules`."""

    split: Split
    of: fx.Node | None = None
    members: dict[int, fx.Node] = field(default_factory=dict)  # by piece
    rules: dict[int, Rule] = field(default_factory=dict)
    whole: fx.Node | None = None

    def __len__(self) -> int:
        return len(self.split.ranges)

    @property
    def operands(self) -> list[tuple[fx.Node, ...]]:
        """What the members read, one operand of all at a time."""
        return operands_of([self.rules[piece] for piece in range(len(self))])

    def differ(self, operands: tuple[fx.Node, ...]) -> bool:
        """Whether all rows need something else of these than the first piece does."""
        node, operand = self.members[0], operands[0]
        if node.target is aten.nll_loss_backward.default and operand is node.args[TOTAL]:
            return False
        return self.rules[0].needs[operand] == ROWS or len(set(operands)) > 1 and is_number(node, operand)


def padded(node: fx.Node) -> tuple[fx.Node, int, int, int] | None:
    """A gradient, and the dimension, begin and end of its place, if `node` is that beside zeros."""
    if node.target not in PADDED or (cut := cut_at(node)) is None:
        return None
    return node.args[PADDED[node.target]], *cut


def shape_of(node: Any) -> tuple:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def cut_at(node: fx.Node) -> tuple[int, int, int] | None:
    """Dimension, begin and end of a slice or a selection, or of the place where it is put into zeros."""
    whole = node.args[0] if node.target in CUTS else node
    if PADDED.get(node.target) == 1 and not (node.args[0].target is aten.full.default and node.args[0].args[1] == 0):
        return None
    dim, *numbers = node.args[2 if node.target in PADDED else 1:] or (0,)
    if not shape_of(whole) or not all(type(n) is int for n in (*shape_of(whole), *(n for n in numbers if n is not None))):
        return None
    dim %= len(shape_of(whole))
    size = shape_of(whole)[dim]
    if "select" in node.target._schema.name:
        return dim, numbers[0] % size, numbers[0] % size + 1
    begin, end, by = slice(*(*numbers, None, None, None)[:3]).indices(size)
    return (dim, begin, end) if by == 1 and begin < end else None


def splits(step: StepGraph) -> Iterator[tuple[fx.Node, Split, dict[fx.Node, int]]]:
    """What comes of wide products and is split, how, and which piece the slices and selections of it are. Of pieces of pieces
    the larger ones."""
    seen: set[fx.Node] = set()
    for product in step.computing():
        stack = [product] if product.target in PRODUCTS and is_wide(product) else []
        while stack:
            if (value := stack.pop()) in seen:
                continue
            seen.add(value)
            users = [u for u in value.users if u.target not in PRODUCTS and shape_of(u)[-1:] == shape_of(product)[-1:]]
            cuts: dict[int, dict[fx.Node, tuple[int, int]]] = defaultdict(dict)
            for user in users:
                if user.target in CUTS and (cut := cut_at(user)) and cut[0] < len(shape_of(value)) - 1:
                    cuts[cut[0]][user] = cut[1:]
            pieces: set[fx.Node] = set()
            for dim, ranges in cuts.items():
                for split in _splits(shape_of(value)[:-1], dim, set(ranges.values())):
                    which = {n: split.ranges.index(at) for n, at in ranges.items() if at in split.ranges}
                    pieces.update(which)
                    yield value, split, which
            stack += [user for user in users if user not in pieces]


def as_matrices(split: Split, pieces: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """What is made of `pieces` as matrices of rows, if nothing else is made of any: a dimension of length 1 is none of the rows then
    (the last token, where there are two in every other piece). Else `pieces`."""
    found: dict[fx.Node, int] = {}
    for start, piece in pieces.items():
        stack = [start]
        while stack:
            node = stack.pop()
            if shape_of(node) == (prod(split.part(piece)), shape_of(start)[-1]):
                found[node] = piece
            elif all(user.target in VIEWS and user.meta["val"].numel() == start.meta["val"].numel() for user in node.users):
                stack += node.users
            else:
                return pieces
    return found


def _splits(rows: tuple[int, ...], dim: int, ranges: set[tuple[int, int]]) -> Iterator[Split]:
    """`ranges` that are all of a dimension: those of equal length, but for the last, and what is left, if it is such."""
    for length in sorted({end for begin, end in ranges if begin == 0}):
        pieces = tuple((at, min(at + length, rows[dim])) for at in range(0, rows[dim], length))
        if len(pieces) > 1 and ranges.issuperset(pieces):
            yield Split(rows, dim, pieces)
            ranges = ranges.difference(pieces)
    begins, ends = [*zip(*sorted(ranges))] or ((), ())
    if len(ranges) > 1 and (0, *ends) == (*begins, rows[dim]):
        yield Split(rows, dim, tuple(sorted(ranges)))


def nodes_of(how: Rule) -> list[fx.Node]:
    """The operands of a rule, in their order."""
    found: list[fx.Node] = []
    fx.map_arg((how.args, dict(how.kwargs)), found.append)
    return found or list(how.needs)


def operands_of(hows: Sequence[Rule]) -> list[tuple[fx.Node, ...]]:
    """Those of rules of one form, an operand at a time."""
    return [*dict.fromkeys(zip(*map(nodes_of, hows), strict=True))]


def clash(operands: list[tuple[fx.Node, ...]]) -> bool:
    """Whether what is one operand of a rule is two of another's (x·x, x·y)."""
    return any(len(set(nodes)) < len(operands) for nodes in zip(*operands))


def form_of(how: Rule) -> str:
    """The arguments of a rule but for its operands."""
    return str(fx.map_arg((how.target, how.args, dict(how.kwargs)), lambda _: "*"))


def is_number(node: fx.Node, operand: fx.Node) -> bool:
    """Whether `operand` may as well be one for each row, or is not read at all."""
    if node.target is aten.nll_loss_backward.default:
        return operand is node.args[TOTAL]
    return torch.Tag.pointwise in node.target.tags and operand.meta["val"].numel() == 1


def filled(node: fx.Node) -> Any:
    """The number that `node` is filled with, as it was made; None if it was made otherwise."""
    if node.target in (aten.full.default, aten.new_full.default):
        number = node.args[1 if node.target is aten.full.default else 2]
        return None if isinstance(number, fx.Node) else number
    return 0 if node.target in (aten.new_zeros.default, aten.zeros_like.default) else None
