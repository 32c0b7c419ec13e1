"""SGD with momentum.

    b ← μb + (1−τ)g  (b ← g in the first step)
    θ ← θ − lr · b, with Nesterov's momentum θ ← θ − lr · (g + μb)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .base import Options, State
from .gradients import LowPrecisionGradients


class SGD(LowPrecisionGradients):
    """`torch.optim.SGD` with dense gradients, one parameter at a time.

    Args:
        params, lr, momentum (μ), dampening (τ), weight_decay (L2), nesterov: as in
            `torch.optim.SGD`.
        options: see `Optimizer`.

    State of a parameter: with momentum `momentum_buffer` (b), of its shape and type; with
    dampening also `step`, which tells the first step from the others.

    Raises:
        OptimizerError: a setting is out of its range.
    """

    elementwise = True
    required = frozenset({"lr", "momentum", "dampening", "nesterov"})
    state_names = frozenset({"step", "momentum_buffer"})
    moments = {"momentum_buffer": True}

    def __init__(self, params: Iterable, lr: float | Tensor = 1e-3, momentum: float = 0.0,
                 dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False,
                 **options: Any) -> None:
        super().__init__(params, options, lr=lr, momentum=momentum, dampening=dampening,
                         weight_decay=weight_decay, nesterov=nesterov)

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        self.check_at_least(group, "momentum", 0)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise self.error("nesterov=True goes with a momentum and without dampening",
                             "set momentum above 0 and dampening to 0")

    def new_state(self, p: Tensor, group: Options) -> State:
        state = {}
        if group["momentum"] != 0:
            # μ·0 + g is g: the first step needs no case of its own, unless there is dampening.
            state["momentum_buffer"] = torch.zeros_like(p)
            if group["dampening"] != 0:
                state["step"] = self.no_steps()
        return state

    def update(self, p: Tensor, grad: Tensor, state: State, group: Options) -> None:
        momentum = group["momentum"]
        if group["weight_decay"] != 0:
            grad = grad.add(p, alpha=group["weight_decay"])
        if momentum != 0:
            weight = 1.0
            if group["dampening"] != 0:
                # 0⁰ = 1: the first step takes the gradient whole. A branch would recompile.
                weight = 1 - group["dampening"] * (1 - 0.0 ** (self.count(state) - 1))
            buffer = state["momentum_buffer"].mul_(momentum).add_(grad, alpha=weight)
            grad = grad.add(buffer, alpha=momentum) if group["nesterov"] else buffer
        p.add_(grad, alpha=-self.rate(group))
