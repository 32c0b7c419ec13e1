"""CAME: Confidence-guided Adaptive Memory Efficient Optimization (Luo et al., 2023), Algorithm 2.

    r, c ← EMA over rows and columns of g² + ε₁ (β₂)       u = g / √(r·c / mean(r))
    û = u / max(1, RMS(u)/d)                                m ← β₁m + (1−β₁)û
    R, C ← EMA over rows and columns of (û − m)² + ε₂ (β₃)  S = R·C / mean(R)
    θ ← (1 − lr·λ)θ − lr · m/√S

No bias is corrected. A parameter with fewer than two dimensions keeps the whole average of
g² + ε₁ and moves by m: it has no instability term.

A mini-batch in N parts is ours, not published: like AdamA it keeps no gradient. With the N-th roots
b₁, b₂, b₃ of the β, each part g, 1/N of its mean gradient, takes an N-th of a step:

    r, c ← EMA of N·g² + ε₁ (b₂)          u = N·g / √(r·c / mean(r))
    û = u / max(1, RMS(u) / (√N·d))       m ← b₁m + (1−b₁)û
    R, C ← EMA of (k/N)·(û − m)² + ε₂ (b₃), k = (β₁/b₁)²

and `step` then moves θ once. As in AdamA, the square of a sum over the parts is taken as the sum of
their squares, here as N times the square of each: of g for Σg, of u/N for the update, of (û − m)/N for
its instability. After m took up the share 1 − b of û, b(û − m) of the former m is left: k makes that
what a whole step leaves. N = 1 is CAME; where gradients agree, the update is up to √N longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .accumulation import Accumulating
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
from .low_bit import precise, read, write
from .settings import two_eps
from .slabs import Slab, cut, kept, square_sum

SQUARES, RESIDUALS = "exp_avg_sq", "exp_avg_res"


class CAME(Accumulating, FactoredOptimizer):
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
        micro_batches: N, how many gradients `accumulate` gets for each step (see `Accumulating`).
            With fewer or more the step takes as many N-ths.
        options: see `Optimizer`; `state_bits` is for m.

    State of a parameter: `exp_avg` (m) of its shape; `exp_avg_sq_row`, `exp_avg_sq_col` (r, c),
    `exp_avg_res_row` and `exp_avg_res_col` (R, C) with size 1 where they average, or `exp_avg_sq`
    of its shape for one that is not factored. In its type, in float32 for one of 16 bits.

    Raises:
        OptimizerError: a setting is out of its range.
    """

    required = frozenset({"lr", "eps", "betas", "clip_threshold"})
    state_names = frozenset({"step", "folded", "exp_avg", "exp_avg_sq", "exp_avg_sq_row",
                             "exp_avg_sq_col", "exp_avg_res_row", "exp_avg_res_col"})
    moments = {"exp_avg": True}

    def __init__(self, params: Iterable, lr: float | Tensor,
                 eps: tuple[float, float] = (1e-30, 1e-16), clip_threshold: float = 1.0,
                 betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
                 weight_decay: float = 0.0, *, factor_dims: str | Sequence[int] | None = None,
                 micro_batches: int = 1, **options: Any) -> None:
        super().__init__(params, options, lr=lr, eps=eps, clip_threshold=clip_threshold,
                         betas=betas, weight_decay=weight_decay, factor_dims=factor_dims,
                         micro_batches=micro_batches)

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        self.check_betas(group, 3)
        eps1, eps2 = two_eps(self, group)
        if not (eps1 >= 0 and eps2 >= 0 and group["clip_threshold"] > 0):
            raise self.error(
                f"eps is {group['eps']}, clip_threshold is {group['clip_threshold']}",
                "choose eps of at least 0 and a clip_threshold above 0")

    def new_state(self, p: Tensor, group: Options) -> State:
        dims, kind, here = factored(p.shape, group["factor_dims"]), precise(p), self.shards.local(p)
        state = {"exp_avg": torch.zeros_like(here, dtype=kind)}
        if dims is None:
            return {**state, "exp_avg_sq": torch.zeros_like(here, dtype=kind)}
        for name in (SQUARES, RESIDUALS):
            state[f"{name}_row"], state[f"{name}_col"] = empty_factors(here, dims, kind)
        return state

    # As one operator of a captured step, which has its own slabs.

    def _fold_in_slabs(self, p: Tensor, grad: Tensor, state: State, group: Options) -> None:
        self.fold(grad, state, group, group["first"])

    def _apply_in_slabs(self, p: Tensor, grad: None, state: State, group: Options) -> None:
        self.apply(p, state, group)

    def fold(self, grad: Tensor, state: State, group: Options, first: bool) -> None:
        whole, grad = grad, self.shards.local(grad)
        dims, (found, group) = factored(whole.shape, group["factor_dims"]), self.begun(whole, state, group)
        squares, residuals = names(SQUARES, dims), [] if dims is None else names(RESIDUALS, dims)
        self.average("_average_squares", squares, whole, grad, found, group)
        found[MEAN] = self.row_mean(squares, found, dims, whole, group)
        rms = self.root_mean_square(self.part("_square_of_update", grad, grad, found, group), whole)  # of u/√N
        found["excess"] = (rms / group["clip_threshold"]).clamp(min=1.0) / group["micro_batches"]**0.5
        means = [name for name in ("exp_avg", "exp_avg_scale") if name in found]
        self.average("_average_update", residuals, whole, grad, found, group, means)

    def apply(self, p: Tensor, state: State, group: Options) -> None:
        whole, p = p, self.shards.local(p)
        dims, (found, group) = factored(whole.shape, group["factor_dims"]), self.begun(whole, state, group)
        found[MEAN] = self.row_mean(names(RESIDUALS, dims), found, dims, whole, group)
        self.part("_move", p, None, found, group, moves=True)

    # The parts of these.

    def _average_squares(self, p: Tensor, grad: Tensor, state: State, group: Options) -> None:
        size, beta, (eps, _) = shape(grad, group), decays(group)[1], group["eps"]
        dims = factored(size, group["factor_dims"])
        squares = decayed(names(SQUARES, dims), state, dims, group, beta)
        for slab in self.slabs(grad, group):
            add_mean(squares, self._part_of(grad, slab, group) ** 2 + eps, slab, dims, size, 1 - beta)

    def _square_of_update(self, p: Tensor, grad: Tensor, state: State, group: Options) -> Tensor:
        pieces = self.slabs(grad, group)
        return square_sum(self._scaled(grad, state, group, pieces), pieces)

    def _average_update(self, p: Tensor, grad: Tensor, state: State, group: Options) -> None:
        size, pieces, formats, n = shape(grad, group), self.slabs(grad, group), self.formats(grad, group), group["micro_batches"]
        dims, (beta1, _, beta3) = factored(size, group["factor_dims"]), decays(group)
        scaled = self._scaled(grad, state, group, pieces)
        residuals = [] if dims is None else decayed(names(RESIDUALS, dims), state, dims, group, beta3)
        share = group["betas"][0] ** (2 - 2 / n) / n
        for slab in pieces:
            update, mean = scaled(slab).div_(state["excess"]), read(state, "exp_avg", grad, slab, formats)
            mean.mul_(beta1).add_(update, alpha=1 - beta1)
            if dims is not None:
                square = update.sub_(mean).square_()
                if n > 1:
                    square.mul_(share)
                add_mean(residuals, square.add_(group["eps"][1]), slab, dims, size, 1 - beta3)
            write(state, "exp_avg", mean, grad, slab, formats)

    def _move(self, p: Tensor, grad: None, state: State, group: Options) -> None:
        dims, formats = factored(shape(p, group), group["factor_dims"]), self.formats(p, group)
        for slab in self.slabs(p, group):
            change = read(state, "exp_avg", p, slab, formats) * self.rate(group)
            if dims is not None:
                change.mul_(inverse_root([state[name] for name in names(RESIDUALS, dims)], state[MEAN], slab))
            self.descend(p, state, slab, group, change)

    def _part_of(self, grad: Tensor, slab: Slab | None, group: Options) -> Tensor:
        """√N·g"""
        n, part = group["micro_batches"], self.gradient(grad, slab, group).to(precise(grad))
        return part * n**0.5 if n > 1 else part

    def _scaled(self, grad: Tensor, state: State, group: Options,
                pieces: list[Slab | None]) -> Callable[[Slab | None], Tensor]:
        """u/√N by slabs."""
        squares = [state[name] for name in names(SQUARES, factored(shape(grad, group), group["factor_dims"]))]
        return kept(state, "scaled", lambda slab: inverse_root(squares, state.get(MEAN), slab).mul_(
            self._part_of(grad, slab, group)), pieces)


def names(average: str, dims: Dims | None) -> list[str]:
    """The tensors of one average: its two factors, or itself where it has none."""
    return [average] if dims is None else [f"{average}_row", f"{average}_col"]


def decays(group: Options) -> list[float]:
    """b₁, b₂, b₃"""
    return [beta ** (1 / group["micro_batches"]) for beta in group["betas"]]


def inverse_root(factors: list[Tensor], mean_row: Tensor | None, slab: Slab | None) -> Tensor:
    """1/√ of one slab of an average: of R·C / mean(R), or of itself where it has no factors."""
    if mean_row is None:
        return cut(factors[0], slab).rsqrt()
    return row_share(factors[0], mean_row, slab).rsqrt_() * cut(factors[1], slab).rsqrt()
