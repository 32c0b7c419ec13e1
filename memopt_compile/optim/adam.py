"""Adam and AdamW.

    m ← β₁m + (1−β₁)g        v ← β₂v + (1−β₂)g²
    θ ← θ − lr · m/(1−β₁ᵗ) / (√(v/(1−β₂ᵗ)) + ε)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .base import Options, State
from .gradients import LowPrecisionGradients


class Adam(LowPrecisionGradients):
    """`torch.optim.Adam`, one parameter at a time.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay: as in
            `torch.optim.Adam`; the betas are floats. `weight_decay` is added to the gradient (L2)
            unless `decoupled_weight_decay`.
        options: see `Optimizer`.

    State of a parameter: `step` (0-dim), `exp_avg` (m), `exp_avg_sq` (v), with `amsgrad` also
    `max_exp_avg_sq`, each of its shape and type.

    Raises:
        OptimizerError: a setting is out of its range.
    """

    elementwise = True
    required = frozenset({"lr", "betas", "eps", "weight_decay", "amsgrad"})  # RAdam's groups have all but the last
    state_names = frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
    moments = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}

    def __init__(self, params: Iterable, lr: float | Tensor = 1e-3,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, amsgrad: bool = False, *,
                 decoupled_weight_decay: bool = False, **options: Any) -> None:
        super().__init__(params, options, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
                         amsgrad=amsgrad, decoupled_weight_decay=decoupled_weight_decay)

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        self.check_betas(group, 2)
        self.check_at_least(group, "eps", 0)

    def new_state(self, p: Tensor, group: Options) -> State:
        names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
        return {"step": self.no_steps(), **{name: torch.zeros_like(p) for name in names}}

    def update(self, p: Tensor, grad: Tensor, state: State, group: Options) -> None:
        decay = group["weight_decay"]
        if decay != 0 and not group["decoupled_weight_decay"]:
            grad = grad.add(p, alpha=decay)
        self.fold(grad, state, group, first=True)
        self.apply(p, state, group)

    def fold(self, grad: Tensor, state: State, group: Options, first: bool) -> None:
        """Take a gradient into the moments, which the `first` of a step decays."""
        beta1, beta2 = group["betas"]
        m, v = state["exp_avg"], state["exp_avg_sq"]
        scale = (1 - beta2) * group.get("v_scale", 1)
        if first:
            weight = 1 - beta1
            m.lerp_(grad, weight.to(m.dtype) if torch.is_tensor(weight) else weight)
            v.mul_(beta2).addcmul_(grad, grad, value=scale)
        else:
            m.add_(grad, alpha=1 - beta1)
            v.addcmul_(grad, grad, value=scale)

    def apply(self, p: Tensor, state: State, group: Options) -> None:
        """Move `p` by its moments."""
        (beta1, beta2), lr, count = group["betas"], self.rate(group), self.count(state)
        if group["weight_decay"] != 0 and group["decoupled_weight_decay"]:
            p.mul_(1 - lr * group["weight_decay"])
        v = state["exp_avg_sq"]
        if group["amsgrad"]:
            v = state["max_exp_avg_sq"].copy_(torch.maximum(state["max_exp_avg_sq"], v))
        unbias = (1 - beta2**count) ** 0.5
        root = v.sqrt().div_(unbias).add_(group["eps"])
        p.addcdiv_(state["exp_avg"], root, value=-(lr / (1 - beta1**count)))


class AdamW(Adam):
    """`torch.optim.AdamW`: `Adam` with decoupled weight decay, θ ← (1 − lr·λ)θ before the step."""

    def __init__(self, params: Iterable, lr: float | Tensor = 1e-3,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2, amsgrad: bool = False, **options: Any) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad,
                         decoupled_weight_decay=True, **options)

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        if group["weight_decay"] != 0 and not group["decoupled_weight_decay"]:  # a checkpoint of Adam
            raise self.error("weight decay is added to gradients, where this one has it decoupled",
                             "load it into Adam, or save it with a weight_decay of 0")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True
