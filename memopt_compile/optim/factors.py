"""Second moments kept as the outer product of their row and column means.

For x ≥ 0 of shape [n, m] and its means R (n × 1) over columns and C (1 × m) over rows, the
approximation of rank one is V = R·C / mean(R): the one with the same row and column sums. Both
factors keep the dimensions that they average over, with size 1, so that they broadcast.

With more than two dimensions the others are either a batch of matrices, each with factors of its
own, or belong to the rows or columns as well (`Dims`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import one_operator
from .base import Optimizer, Options, State
from .low_bit import CORRECTION, precise
from .slabs import Slab, cut

MEAN = "mean_row"  # found by an update: mean(R)


class FactoredOptimizer(Optimizer):
    """An optimizer with the setting `factor_dims`, seen to fit its parameters.

    Its update is a sequence of parts, each of the rows that are here, with sums over the ranks between them. A part
    is a method ``(p, grad, state, group)``, whose state has what was found before, and may be an operator of a
    captured step (`one_operator`).
    """

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        dims = group["factor_dims"]
        if dims not in (None, "auto") and (isinstance(dims, str) or len(dims) != 2):
            raise self.error(f"factor_dims is {dims!r}", "choose None, 'auto' or two dimensions")

    def check_parameter(self, p: Tensor, group: Options) -> None:
        super().check_parameter(p, group)
        dims = group["factor_dims"]
        if dims in (None, "auto") or p.dim() < 2:
            return
        places = {d % p.dim() for d in dims if -p.dim() <= d < p.dim()}
        if len(places) < 2:
            raise self.error(
                f"a parameter of shape {tuple(p.shape)} cannot be factored by {tuple(dims)}",
                "choose two dimensions that it has, or give it a group of its own")

    def _update_in_slabs(self, p: Tensor, grad: Tensor, state: State, group: Options) -> None:
        self.update(p, grad, state, group)  # which has slabs of its own

    def by_rows(self, name: str, p: Tensor, group: Options) -> bool:
        dims = factored(p.shape, group["factor_dims"])
        gone = dims and (dims.columns if "row" in name else dims.rows if "col" in name else ())
        return not gone or 0 not in gone

    def begun(self, p: Tensor, state: State, group: Options) -> tuple[State, Options]:
        """State and settings for the parts: with room for what they find, and with what they know of the whole."""
        return dict(state), {**group, "rows": p.shape[0] if p.dim() else 1, "ranks": self.shards.ranks}

    def part(self, method: str, p: Tensor, grad: Tensor | None, state: State, group: Options,
             changes: Sequence[str] = (), moves: bool = False) -> Any:
        """What this method returns, 0-dim, if anything. It `changes` these states, and the parameter if it `moves`."""
        if group["ranks"] == 1 or not one_operator.applies(self, p, group, self.shards.largest(shape(p, group))):
            return getattr(self, method)(p, grad, state, group)
        if moves:
            changes = [*changes, CORRECTION]  # where there is one
        elif not changes:
            changes = [one_operator.RESULT]
            state = {**state, one_operator.RESULT: p.new_zeros((), dtype=precise(p))}
        reads = [name for name, value in state.items() if isinstance(value, Tensor)
                 and name != one_operator.STEP and name not in changes]
        one_operator.apply(self, method, p, grad, state, group, changes, moves, reads)
        return state.get(one_operator.RESULT)

    def average(self, method: str, factors: Sequence[str], whole: Tensor, grad: Tensor, state: State, group: Options,
                changes: Sequence[str] = ()) -> None:
        """A part that adds to these averages, and `changes` other states too. A mean over the rows of several ranks
        is then the sum of theirs."""
        self.part(method, grad, grad, state, group, [*factors, *changes])
        for name, gone in zip(factors, dims_gone(factored(whole.shape, group["factor_dims"]))):
            if crosses(gone, group):
                total, keep = self.shards.total(state[name], whole), group.get(one_operator.KEEP)
                state[name].copy_(total if keep is None else torch.where(keep, total, state[name]))

    def row_mean(self, factors: Sequence[str], state: State, dims: Dims | None, p: Tensor,
                 group: Options) -> Tensor | None:
        """mean(R), None where there is no R."""
        if dims is None:
            return None
        row = state[factors[0]]
        if not crosses(dims.rows, group):
            return row.mean(dims.rows, keepdim=True)
        count = math.prod([p.shape[d] for d in dims.rows])  # a list: Dynamo takes no generator
        return self.shards.total(row.sum(dims.rows, keepdim=True), p) / count

    def root_mean_square(self, square: Tensor, p: Tensor) -> Tensor:
        """RMS, 0-dim, of a tensor of the shape of `p`, the sum of whose squares is `square` here."""
        return self.shards.total(square, p) ** 0.5 / p.numel()**0.5

    def descend(self, p: Tensor, state: State, slab: Slab | None, group: Options,
                change: Tensor) -> None:
        """θ ← (1 − lr·λ)θ − change, one slab."""
        def decay_and_move(weight: Tensor) -> None:
            if group["weight_decay"] != 0:
                weight.mul_(1 - self.rate(group) * group["weight_decay"])
            weight.sub_(change)

        self.move(p, state, slab, group, decay_and_move)


class Dims(NamedTuple):
    """Dimensions that count rows, and those that count columns; the rest are a batch."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]


def factored(shape: Sequence[int], choice: Any) -> Dims | None:
    """How a parameter of this shape is factored, None for not at all.

    Args:
        choice: None for the last two dimensions, as published; two dimensions, rows then columns;
            or ``"auto"`` for the cut of all dimensions into leading rows and trailing columns that
            leaves the smallest factors, and no factors where two pairs of them would have more
            elements than the parameter (then Adam's state would be smaller).
    """
    if len(shape) < 2 or 0 in shape:
        return None
    if choice == "auto":
        at = min(range(1, len(shape)), key=lambda k: math.prod(shape[:k]) + math.prod(shape[k:]))
        if 2 * (math.prod(shape[:at]) + math.prod(shape[at:])) > math.prod(shape):
            return None
        return Dims(tuple(range(at)), tuple(range(at, len(shape))))
    row, column = (d % len(shape) for d in choice or (-2, -1))
    return Dims((row,), (column,))


def dims_gone(dims: Dims | None) -> list[tuple[int, ...]]:
    """The dimensions that each factor averages over, in their order: R and C, or V."""
    return [()] if dims is None else [dims.columns, dims.rows]


def crosses(gone: tuple[int, ...], group: Options) -> bool:
    """Whether a mean over the dimensions `gone` is over the rows of several ranks."""
    return group["ranks"] > 1 and 0 in gone


def shape(p: Tensor, group: Options) -> tuple[int, ...]:
    """The shape of the parameter of which `p` has some rows."""
    return (int(group["rows"]), *p.shape[1:])


def decayed(factors: Sequence[str], state: State, dims: Dims | None, group: Options,
            beta: float | Tensor) -> list[Tensor]:
    """These averages, of which `beta` is left, for `add_mean` in a part. Those over the rows of several ranks are
    added up behind it, so each has its share. (To keep it aside would be a reader of what the part writes over.)"""
    return [state[name].mul_(beta / group["ranks"] if crosses(gone, group) else beta)
            for name, gone in zip(factors, dims_gone(dims))]


def empty_factors(p: Tensor, dims: Dims, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Zeros for R and C of a parameter, or of some of its rows, on its device."""
    row, column = ([1 if d in gone else size for d, size in enumerate(p.shape)]
                   for gone in (dims.columns, dims.rows))
    return p.new_zeros(row, dtype=dtype), p.new_zeros(column, dtype=dtype)


def add_mean(factors: Sequence[Tensor], part: Tensor, slab: Slab | None, dims: Dims | None,
             shape: Sequence[int], weight: float | Tensor) -> None:
    """Add to R and C (or to an unfactored V) what one slab contributes to ``weight · mean``.

    Args:
        part: the slab of the non-negative tensor of shape `shape` that is averaged.
    """
    if dims is None:
        cut(factors[0], slab).add_(part * weight)
        return
    for factor, gone in zip(factors, dims_gone(dims)):
        count = math.prod([shape[d] for d in gone])
        cut(factor, slab).add_(part.sum(gone, keepdim=True) * (weight / count))


def row_share(row: Tensor, mean: Tensor, slab: Slab | None, floor: float = 0.0) -> Tensor:
    """R / mean(R) of one slab, the mean no smaller than `floor`."""
    mean = cut(mean, slab)
    return cut(row, slab) / (mean.clamp(min=floor) if floor else mean)
