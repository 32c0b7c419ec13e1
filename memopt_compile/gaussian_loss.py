"""The negative log likelihood of a Gaussian, which refuses negative variances: a branch on data, which ends a trace.

Here an operator looks at them while the step runs. What it gives is the variance that the loss reads, so that nothing
that follows from the loss comes before it has looked.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NEGATIVE = "var has negative entry/entries"  # what torch says


@torch.library.custom_op("memopt::variance_from", mutates_args=())
def variance_from(variance: Tensor, least: float) -> Tensor:
    """`variance`, no smaller than `least`; its gradient passes through as if it always were.

    Raises:
        ValueError: some are negative.
    """
    if (variance < 0).any():
        raise ValueError(NEGATIVE)
    return variance.clamp(min=least)


variance_from.register_fake(lambda variance, least: torch.empty_like(variance))
variance_from.register_autograd(lambda ctx, grad: (grad, None))


def gaussian_nll_loss(input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6,
                      reduction: str = "mean") -> Tensor:
    """As `torch.nn.functional` has it."""
    if isinstance(var, float):
        if var < 0:
            raise ValueError(NEGATIVE)
        var = var * torch.ones_like(input)
    if var.shape != input.shape:
        if input.shape[:-1] == var.shape:
            var = var.unsqueeze(-1)
        elif input.dim() != var.dim() or sum(y for x, y in zip(input.shape, var.shape) if x != y) != 1:  # several, or not 1
            raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    var = torch.ops.memopt.variance_from(var, eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss
