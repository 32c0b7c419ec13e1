"""The multi-label margin loss by the kernels that eager runs.

In compiled code torch has arithmetic in place of them. With targets that end by -1, as almost all do, its loss and its
gradient are wrong there (torch 2.11 and 2.13), and it holds classes × classes numbers for each row. As
operators of ours the kernels stay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@torch.library.custom_op("memopt::multilabel_margin_loss", mutates_args=())
def forward(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """The loss, of each row if `reduction` is 0, and a mask of `x`'s shape for backward."""
    return aten.multilabel_margin_loss_forward(x, target, reduction)


@torch.library.custom_op("memopt::multilabel_margin_loss_backward", mutates_args=())
def backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, is_target: Tensor) -> Tensor:
    return aten.multilabel_margin_loss_backward(grad, x, target, reduction, is_target)


@forward.register_fake
def _(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[:-1] if reduction == 0 else ()), x.new_empty(x.shape)


@backward.register_fake
def _(grad: Tensor, x: Tensor, target: Tensor, reduction: int, is_target: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    x, target, ctx.reduction = inputs
    ctx.save_for_backward(x, target, output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    x, target, is_target = ctx.saved_tensors
    return backward(grad, x, target, ctx.reduction, is_target), None, None


forward.register_autograd(_differentiate, setup_context=_keep)


def multilabel_margin_loss(input: Tensor, target: Tensor, size_average: bool | None = None, reduce: bool | None = None,
                           reduction: str = "mean") -> Tensor:
    """As `torch.nn.functional` has it."""
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    return torch.ops.memopt.multilabel_margin_loss(input, target, ("none", "mean", "sum").index(reduction))[0]
