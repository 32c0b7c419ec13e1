"""Adafactor (Shazeer and Stern, 2018) as `torch.optim.Adafactor` has it.

    w = t^τ (τ = `beta2_decay`), ρ = min(lr, 1/√t), α = max(ε₂, RMS(θ))·ρ, θ ← (1 − lr·λ)θ
    R ← (1−w)R + w·mean(g²; columns), C ← (1−w)C + w·mean(g²; rows), V = R·C / max(mean(R), ε₁)
    U = g / max(√V, ε₁), θ ← θ − α·U / max(1, RMS(U)/d)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .base import Options, State
from .factors import FactoredOptimizer, add_mean, empty_factors, factored, row_share
from .low_bit import precise, read_weight
from .slabs import Slab, cut, kept


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
        eps1, eps2 = group["eps"]
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
        lr, (eps1, eps2) = self.rate(group), group["eps"]
        whole, p, grad = p, self.shards.local(p), self.shards.local(grad)
        form = self.weight_format(p, group)
        tiny = torch.finfo(p.dtype if form is None else precise(p)).eps if eps1 is None else eps1
        count = torch.as_tensor(self.count(state), dtype=torch.float64)
        weight = count ** group["beta2_decay"]
        pace = (count**-0.5).clamp(max=lr)
        pieces = self.slabs(p, group)
        size = self.root_mean_square(lambda slab: read_weight(p, state, slab, form), pieces, whole)
        scale = size.to(torch.float64).clamp(min=eps2) * pace

        dims = factored(whole.shape, group["factor_dims"])
        moment = [state["variance"]] if dims is None else [state["row_var"], state["col_var"]]
        for factor in moment:
            factor.mul_(1 - weight)
        sums = self.sums(moment, dims)
        for slab in pieces:
            add_mean(sums, self.gradient(grad, slab, group).square(), slab, dims, whole.shape, weight)
        self.complete(moment, sums, whole)
        mean_row = self.row_mean(moment, dims, whole)
        scaled = kept(lambda slab: inverse_root(moment, mean_row, slab, tiny).mul_(
            self.gradient(grad, slab, group)), pieces)
        excess = self.root_mean_square(scaled, pieces, whole).to(torch.float64) / group["d"]
        rate = scale / excess.clamp(min=1.0)
        for slab in pieces:
            self.descend(p, state, slab, group, scaled(slab).mul_(rate))


def inverse_root(moment: list[Tensor], mean_row: Tensor | None, slab: Slab | None,
                 tiny: float) -> Tensor:
    """1 / max(√V, ε₁) of one slab, V by its factors or whole."""
    if mean_row is None:
        variance = cut(moment[0], slab)
    else:
        variance = row_share(moment[0], mean_row, slab, tiny) * cut(moment[1], slab)
    return variance.clamp(min=tiny * tiny).rsqrt_()
