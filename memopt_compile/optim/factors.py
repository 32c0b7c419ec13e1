"""Second moments kept as the outer product of their row and column means.

For x ≥ 0 of shape [n, m] and its means R (n × 1) over columns and C (1 × m) over rows, the
approximation of rank one is V = R·C / mean(R): the one with the same row and column sums. Both
factors keep the dimensions that they average over, with size 1, so that they broadcast.

With more than two dimensions the others are either a batch of matrices, each with factors of its
own, or belong to the rows or columns as well (`Dims`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .base import Optimizer, Options, State
from .slabs import Slab, cut, square_sum


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

    def _update_in_slabs(self, p: Tensor, grad: Tensor, state: State, group: Options) -> None:
        self.update(p, grad, state, group)  # which has slabs of its own

    def by_rows(self, name: str, p: Tensor, group: Options) -> bool:
        dims = factored(p.shape, group["factor_dims"])
        gone = dims and (dims.columns if "row" in name else dims.rows if "col" in name else ())
        return not gone or 0 not in gone

    def crosses(self, gone: tuple[int, ...]) -> bool:
        """Whether a mean over the dimensions `gone` is over the rows of several ranks."""
        return self.shards.ranks > 1 and 0 in gone

    def sums(self, factors: list[Tensor], dims: Dims | None) -> list[Tensor]:
        """What `add_mean` shall add to: the factors, or zeros in place of those that `complete` adds up
        over ranks."""
        gone = [()] if dims is None else [dims.columns, dims.rows]
        return [torch.zeros_like(factor) if self.crosses(of) else factor
                for factor, of in zip(factors, gone)]

    def complete(self, factors: list[Tensor], sums: list[Tensor], p: Tensor) -> None:
        """Add `sums` to the factors."""
        for factor, part in zip(factors, sums):
            if part is not factor:
                factor.add_(self.shards.total(part, p))

    def row_mean(self, factors: list[Tensor], dims: Dims | None, p: Tensor) -> Tensor | None:
        """mean(R), None where there is no R."""
        if dims is None:
            return None
        if not self.crosses(dims.rows):
            return factors[0].mean(dims.rows, keepdim=True)
        count = math.prod([p.shape[d] for d in dims.rows])  # a list: Dynamo takes no generator
        return self.shards.total(factors[0].sum(dims.rows, keepdim=True), p) / count

    def root_mean_square(self, value: Callable[[Slab | None], Tensor], pieces: list[Slab | None],
                         p: Tensor) -> Tensor:
        """RMS, 0-dim, of a tensor of the shape of `p` that `value` makes a slab at a time."""
        return self.shards.total(square_sum(value, pieces), p) ** 0.5 / p.numel()**0.5

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
    for factor, gone in zip(factors, (dims.columns, dims.rows)):
        count = math.prod([shape[d] for d in gone])
        cut(factor, slab).add_(part.sum(gone, keepdim=True) * (weight / count))


def row_share(row: Tensor, mean: Tensor, slab: Slab | None, floor: float = 0.0) -> Tensor:
    """R / mean(R) of one slab, the mean no smaller than `floor`."""
    mean = cut(mean, slab)
    return cut(row, slab) / (mean.clamp(min=floor) if floor else mean)
