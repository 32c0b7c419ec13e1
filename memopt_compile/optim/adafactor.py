"""Adafactor (Shazeer and Stern, 2018) as `torch.optim.Adafactor` has it.

    w = t^τ (τ = `beta2_decay`), ρ = min(lr, 1/√t), α = max(ε₂, RMS(θ))·ρ, θ ← (1 − lr·λ)θ
    R ← (1−w)R + w·mean(g²; columns), C ← (1−w)C + w·mean(g²; rows), V = R·C / max(mean(R), ε₁)
    U = g / max(√V, ε₁), θ ← θ − α·U / max(1, RMS(U)/d)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .base import Options, State
from .factors import (
    MEAN,
    Dims,
    FactoredOptimizer,
    add_mean,
    decayed,
    empty_factors,
    factored,
    row_share,
    shape,
)
from .low_bit import precise, read_weight
from .settings import two_eps
from .slabs import Slab, cut, kept, square_sum

WEIGHT = "weight"  # the parameter, where it is read only


class Adafactor(FactoredOptimizer):
    """`torch.optim.Adafactor`, with the choice of the dimensions that are factored.

    Args:
        params, lr, beta2_decay, eps (ε₁, ε₂), d, weight_decay: as in
            `torch.optim.Adafactor`; ε₁ None is the rounding unit of the parameter's type.
        factor_dims: see `factors.factored`. Without it, the last two dimensions.
        options: see `Optimizer`. No moment has the parameter's shape: `state_bits` is idle.

    State of a parameter: `step`, and `row_var` (R) and `col_var` (C) with size 1 where they
    average, or `variance` (V) of its shape for one that is not factored; in its type.

    Raises:
        OptimizerError: a setting is out of its range.
    """

    required = frozenset({"lr", "beta2_decay", "eps", "d"})
    state_names = frozenset({"step", "row_var", "col_var", "variance"})

    def __init__(self, params: Iterable, lr: float | Tensor = 1e-2, beta2_decay: float = -0.8,
                 eps: tuple[float | None, float] = (None, 1e-3), d: float = 1.0,
                 weight_decay: float = 0.0, *, factor_dims: str | Sequence[int] | None = None,
                 **options: Any) -> None:
        super().__init__(params, options, lr=lr, beta2_decay=beta2_decay, eps=eps, d=d,
                         weight_decay=weight_decay, factor_dims=factor_dims)

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        self.check_at_least(group, "d", 1)
        eps1, eps2 = two_eps(self, group)
        if not (group["beta2_decay"] <= 0 and eps2 >= 0 and (eps1 is None or eps1 >= 0)):
            raise self.error(f"beta2_decay is {group['beta2_decay']}, eps is {group['eps']}",
                             "choose beta2_decay of at most 0 and eps of at least 0")

    def new_state(self, p: Tensor, group: Options) -> State:
        dims = factored(p.shape, group["factor_dims"])
        here = self.shards.local(p)
        if dims is None:
            return {"step": self.no_steps(), "variance": torch.zeros_like(here)}
        row, column = empty_factors(here, dims, p.dtype)
        return {"step": self.no_steps(), "row_var": row, "col_var": column}

    def update(self, p: Tensor, grad: Tensor, state: State, group: Options) -> None:
        lr, whole, p, grad = self.rate(group), p, self.shards.local(p), self.shards.local(grad)
        dims, (found, group) = factored(whole.shape, group["factor_dims"]), self.begun(whole, state, group)
        moment = names(dims)
        size = self.root_mean_square(self.part("_square_of_weight", p, None, {**found, WEIGHT: p}, group), whole)
        pace = (self._count(state)**-0.5).clamp(max=lr)
        scale = size.to(torch.float64).clamp(min=group["eps"][1]) * pace
        self.average("_average_squares", moment, whole, grad, found, group)
        found[MEAN] = self.row_mean(moment, found, dims, whole, group)
        rms = self.root_mean_square(self.part("_square_of_update", p, grad, found, group), whole)
        found["rate"] = scale / (rms.to(torch.float64) / group["d"]).clamp(min=1.0)
        self.part("_move", p, grad, found, group, moves=True)

    # The parts of it.

    def _square_of_weight(self, p: Tensor, grad: None, state: State, group: Options) -> Tensor:
        p = state[WEIGHT]
        form = self.weight_format(p, group)
        return square_sum(lambda slab: read_weight(p, state, slab, form), self.slabs(p, group))

    def _average_squares(self, p: Tensor, grad: Tensor, state: State, group: Options) -> None:
        size, weight = shape(p, group), self._count(state) ** group["beta2_decay"]
        dims = factored(size, group["factor_dims"])
        moment = decayed(names(dims), state, dims, group, 1 - weight)
        for slab in self.slabs(p, group):
            add_mean(moment, self.gradient(grad, slab, group).square(), slab, dims, size, weight)

    def _square_of_update(self, p: Tensor, grad: Tensor, state: State, group: Options) -> Tensor:
        pieces = self.slabs(p, group)
        return square_sum(self._scaled(p, grad, state, group, pieces), pieces)

    def _move(self, p: Tensor, grad: Tensor, state: State, group: Options) -> None:
        pieces = self.slabs(p, group)
        scaled = self._scaled(p, grad, state, group, pieces)
        for slab in pieces:
            self.descend(p, state, slab, group, scaled(slab).mul_(state["rate"]))

    def _count(self, state: State) -> Tensor:
        """t, 0-dim"""
        return torch.as_tensor(self.count(state), dtype=torch.float64)

    def _scaled(self, p: Tensor, grad: Tensor, state: State, group: Options,
                pieces: list[Slab | None]) -> Callable[[Slab | None], Tensor]:
        """U by slabs."""
        form, tiny = self.weight_format(p, group), group["eps"][0]
        tiny = torch.finfo(p.dtype if form is None else precise(p)).eps if tiny is None else tiny
        moment = [state[name] for name in names(factored(shape(p, group), group["factor_dims"]))]
        return kept(state, "scaled", lambda slab: inverse_root(moment, state.get(MEAN), slab, tiny).mul_(
            self.gradient(grad, slab, group)), pieces)


def names(dims: Dims | None) -> list[str]:
    """The tensors of V: its two factors, or itself where it has none."""
    return ["variance"] if dims is None else ["row_var", "col_var"]


def inverse_root(moment: list[Tensor], mean_row: Tensor | None, slab: Slab | None,
                 tiny: float) -> Tensor:
    """1 / max(√V, ε₁) of one slab, V by its factors or whole."""
    if mean_row is None:
        variance = cut(moment[0], slab)
    else:
        variance = row_share(moment[0], mean_row, slab, tiny) * cut(moment[1], slab)
    return variance.clamp(min=tiny * tiny).rsqrt_()
