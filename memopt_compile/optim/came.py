"""CAME: Confidence-guided Adaptive Memory Efficient Optimization (Luo et al., 2023), Algorithm 2.

    r, c ← EMA over rows and columns of g² + ε₁ (β₂)       u = g / √(r·c / mean(r))
    û = u / max(1, RMS(u)/d)                                m ← β₁m + (1−β₁)û
    R, C ← EMA over rows and columns of (û − m)² + ε₂ (β₃)  S = R·C / mean(R)
    θ ← (1 − lr·λ)θ − lr · m/√S

No bias is corrected. A parameter with fewer than two dimensions keeps the whole average of
g² + ε₁ and moves by m: it has no instability term.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .base import Options, State
from .factors import Dims, FactoredOptimizer, add_mean, empty_factors, factored, row_share
from .low_bit import precise, read, write
from .slabs import Slab, cut, kept, root_mean_square


class CAME(FactoredOptimizer):
    """CAME, equal step by step to the published package with its defaults.

    Args:
        params: as in `torch.optim`.
        lr: learning rate. There is no default: the published one has none.
        eps: ε₁ and ε₂, added to squared gradients and to instabilities.
        clip_threshold: d, the largest root mean square of an update.
        betas: β₁ of the update m, β₂ of the second moment, β₃ of the instability.
        weight_decay: λ, decoupled.
        factor_dims: see `factors.factored`. Without it the last two dimensions, as published:
            for a convolution of 1×1 that is more state than Adam's. ``"auto"`` never is.
        options: see `Optimizer`; `state_bits` is for m.

    State of a parameter: `exp_avg` (m) of its shape; `exp_avg_sq_row`, `exp_avg_sq_col` (r, c),
    `exp_avg_res_row` and `exp_avg_res_col` (R, C) with size 1 where they average, or `exp_avg_sq`
    of its shape for one that is not factored. In its type, in float32 for one of 16 bits.

    Raises:
        OptimizerError: a setting is out of its range.
    """

    required = frozenset({"lr", "eps", "betas", "clip_threshold"})
    state_names = frozenset({"step", "exp_avg", "exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col",
                             "exp_avg_res_row", "exp_avg_res_col"})
    moments = {"exp_avg": True}

    def __init__(self, params: Iterable, lr: float | Tensor,
                 eps: tuple[float, float] = (1e-30, 1e-16), clip_threshold: float = 1.0,
                 betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
                 weight_decay: float = 0.0, *, factor_dims: str | Sequence[int] | None = None,
                 **options: Any) -> None:
        super().__init__(params, options, lr=lr, eps=eps, clip_threshold=clip_threshold,
                         betas=betas, weight_decay=weight_decay, factor_dims=factor_dims)

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        self.check_betas(group, 3)
        eps1, eps2 = group["eps"]
        if not (eps1 >= 0 and eps2 >= 0 and group["clip_threshold"] > 0):
            raise self.error(
                f"eps is {group['eps']}, clip_threshold is {group['clip_threshold']}",
                "choose eps of at least 0 and a clip_threshold above 0")

    def new_state(self, p: Tensor, group: Options) -> State:
        dims, kind = factored(p.shape, group["factor_dims"]), precise(p)
        state = {"exp_avg": torch.zeros_like(p, dtype=kind)}
        if dims is None:
            return {**state, "exp_avg_sq": torch.zeros_like(p, dtype=kind)}
        for name in ("exp_avg_sq", "exp_avg_res"):
            state[f"{name}_row"], state[f"{name}_col"] = empty_factors(p, dims, kind)
        return state

    def update(self, p: Tensor, grad: Tensor, state: State, group: Options) -> None:
        (beta1, beta2, beta3), (eps1, eps2), lr = group["betas"], group["eps"], self.rate(group)
        dims = factored(p.shape, group["factor_dims"])
        pieces, formats, kind = self.slabs(p, group), self.formats(p, group), precise(p)

        def gradient(slab: Slab | None) -> Tensor:
            return self.gradient(grad, slab, group).to(kind)

        squares = moment(state, "exp_avg_sq", dims, beta2)
        for slab in pieces:
            add_mean(squares, gradient(slab) ** 2 + eps1, slab, dims, p.shape, 1 - beta2)

        scaled = kept(lambda slab: inverse_root(squares, slab, dims).mul_(gradient(slab)), pieces)
        rms = root_mean_square(scaled, pieces, p.numel())
        excess = (rms / group["clip_threshold"]).clamp(min=1.0)

        residuals = [] if dims is None else moment(state, "exp_avg_res", dims, beta3)
        for slab in pieces:
            update, mean = scaled(slab).div_(excess), read(state, "exp_avg", p, slab, formats)
            mean.mul_(beta1).add_(update, alpha=1 - beta1)
            if dims is not None:
                add_mean(residuals, (update - mean) ** 2 + eps2, slab, dims, p.shape, 1 - beta3)
            write(state, "exp_avg", mean, p, slab, formats)

        if group["weight_decay"] != 0:
            p.mul_(1 - lr * group["weight_decay"])
        for slab in pieces:
            move = read(state, "exp_avg", p, slab, formats) * lr
            if dims is not None:
                move.mul_(inverse_root(residuals, slab, dims))
            cut(p, slab).sub_(move)


def moment(state: State, name: str, dims: Dims | None, beta: float) -> list[Tensor]:
    """The tensors of one average, decayed: its two factors, or itself where it has none."""
    names = [name] if dims is None else [f"{name}_row", f"{name}_col"]
    return [state[name].mul_(beta) for name in names]


def inverse_root(factors: list[Tensor], slab: Slab | None, dims: Dims | None) -> Tensor:
    """1/√ of one slab of an average: of R·C / mean(R), or of itself where it has no factors."""
    if dims is None:
        return cut(factors[0], slab).rsqrt()
    return row_share(factors[0], slab, dims).rsqrt_() * cut(factors[1], slab).rsqrt()
