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

from .base import Optimizer, Options, State
from .slabs import Slab, cut


class FactoredOptimizer(Optimizer):
    """An optimizer with the setting `factor_dims`, seen to fit its parameters."""

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


def empty_factors(p: Tensor, dims: Dims, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Zeros for R and C of a parameter, on its device."""
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
    for factor, gone in zip(factors, (dims.columns, dims.rows)):
        count = math.prod([shape[d] for d in gone])
        cut(factor, slab).add_(part.sum(gone, keepdim=True) * (weight / count))


def row_share(row: Tensor, slab: Slab | None, dims: Dims, floor: float = 0.0) -> Tensor:
    """R / mean(R) of one slab, the mean no smaller than `floor`."""
    part = cut(row, slab)
    across = slab is not None and slab.dim in dims.rows  # then the mean is over all slabs
    mean = (row if across else part).mean(dims.rows, keepdim=True)
    return part / (mean.clamp(min=floor) if floor else mean)
