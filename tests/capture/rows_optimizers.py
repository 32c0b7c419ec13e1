"""Optimizers as other libraries write them: numbers in groups, lists of tensors, wrappers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from loops import Loop, both_and, loop, mlp, plain, row
from torch import nn


def _groups(model: nn.Module) -> list[dict]:
    parameters = list(model.parameters())
    return [{"params": [p for p in parameters if p.dim() > 1]}, {"params": [p for p in parameters if p.dim() < 2], "decay": 0.0}]


class _Averaging(torch.optim.Optimizer):
    """Weights beside their own mean, as a rate that warms up weighs them; the first has a weight of zero."""

    def __init__(self, parameters, lr) -> None:
        super().__init__(parameters, {"lr": lr, "decay": 0.1, "count": 0, "largest": 0.0, "weights": 0.0})

    @torch.no_grad()
    def step(self):
        most = max(group["lr"] for group in self.param_groups)
        for group in self.param_groups:
            if group["lr"] not in [most, 0.5] or not isinstance(most, float):
                raise RuntimeError("groups differ")
            rate = pow(math.sqrt(group["lr"]), 2) * (group["count"] / 3 if group["count"] < 3 else 1.0)
            group["largest"] = max(rate, group["largest"])
            weight = (group["count"] + 1) ** 0.5 * group["largest"] ** 2
            group["weights"] = group["weights"] + weight
            try:
                share = weight / group["weights"]
            except ZeroDivisionError:
                share = 0
            trained = [p for p in group["params"] if p.grad is not None]
            for p in trained:
                if len(self.state[p]) == 0:
                    self.state[p].update(z=p.clone(), squares=torch.zeros_like(p))
            gradients, squares = [p.grad for p in trained], [self.state[p]["squares"] for p in trained]
            ends = [self.state[p]["z"] for p in trained]
            torch._foreach_mul_(squares, 0.9)
            torch._foreach_addcmul_(squares, gradients, gradients, value=0.1)
            roots = torch._foreach_sqrt(squares)
            torch._foreach_maximum_(roots, 1e-3)
            torch._foreach_div_(gradients, roots)
            if group["decay"] != 0:
                torch._foreach_add_(gradients, trained, alpha=group["decay"])
            torch._foreach_lerp_(trained, ends, weight=share)
            torch._foreach_add_(trained, gradients, alpha=rate * (0.9 * (1 - share) - 1))
            torch._foreach_sub_(ends, gradients, alpha=rate)
            group["count"] += 1


@row
def weighted_means() -> Loop:
    model = mlp()
    opt = _Averaging(_groups(model), 0.05)

    def after(i: int) -> None:
        for group in opt.param_groups:
            group["lr"] *= 0.9

    def numbers() -> list:
        return [(type(value).__name__, value) for group in opt.param_groups for key, value in group.items() if key != "params"]

    return plain(model, opt, after=after, wrap=both_and(numbers))


class _Differences(torch.optim.Optimizer):
    """Its state begins with the first gradient, and its groups with the first update."""

    def _init_group(self, group, trained, before):
        for p in group["params"]:
            if p.grad is not None:
                if "before" not in self.state[p]:
                    self.state[p]["before"] = p.grad.clone().neg_()
                trained.append(p)
                before.append(self.state[p]["before"])
        if "step" not in group:
            group["step"] = torch.zeros(())

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            trained, before = [], []
            self._init_group(group, trained, before)
            group["step"] += 1
            for p, old in zip(trained, before):
                p.sub_(group["lr"] * (p.grad + 0.5 * (p.grad + old)))
                old.copy_(p.grad).neg_()


@row
def state_that_begins_with_the_gradient() -> Loop:
    model = mlp()
    opt = _Differences(_groups(model), {"lr": 0.1})
    return plain(model, opt, wrap=both_and(lambda: [float(group["step"]) for group in opt.param_groups]))


class _Counting(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            rate = group["lr"] * math.sqrt(1 - math.pow(0.9, group["step"])) / (1 - math.pow(0.5, group["step"]))
            for p in group["params"]:
                self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                p.add_(self.state[p]["mean"], alpha=-rate)


@row
def counts_of_a_global_optimizer() -> Loop:
    """As scripts have it. Dynamo takes a whole number that is global for a constant."""
    global counting
    model = mlp()
    counting = _Counting(_groups(model), {"lr": 0.1})

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        counting.step()
        counting.zero_grad()
        return loss

    return loop(model, counting, step, wrap=both_and(lambda: [group["step"] for group in counting.param_groups]))
