"""Margin losses by the kernels that eager runs.

In compiled code torch has arithmetic in place of them (torch 2.11 and 2.13). For several labels its loss and its
gradient are wrong with targets that end by -1, as almost all do, and it holds classes × classes numbers for each
row. For one label its gradient is another where a class is exactly at the margin. As operators of ours the kernels
stay.
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


@torch.library.custom_op("memopt::multi_margin_loss", mutates_args=())
def one_label(x: Tensor, target: Tensor, p: int, margin: float, weight: Tensor | None, reduction: int) -> Tensor:
    return aten.multi_margin_loss(x, target, p, margin, weight, reduction)


@torch.library.custom_op("memopt::multi_margin_loss_backward", mutates_args=())
def one_label_backward(grad: Tensor, x: Tensor, target: Tensor, p: int, margin: float, weight: Tensor | None,
                       reduction: int) -> Tensor:
    return aten.multi_margin_loss_backward(grad, x, target, p, margin, weight, reduction)


@one_label.register_fake
def _(x: Tensor, target: Tensor, p: int, margin: float, weight: Tensor | None, reduction: int) -> Tensor:
    return x.new_empty(target.shape if reduction == 0 else ())


@one_label_backward.register_fake
def _(grad: Tensor, x: Tensor, target: Tensor, p: int, margin: float, weight: Tensor | None,
      reduction: int) -> Tensor:
    return torch.empty_like(x)


def _keep_one_label(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, target, ctx.p, ctx.margin, weight, ctx.reduction = inputs
    ctx.save_for_backward(x, target, weight)


def _differentiate_one_label(ctx: Any, grad: Tensor) -> tuple:
    x, target, weight = ctx.saved_tensors
    return one_label_backward(grad, x, target, ctx.p, ctx.margin, weight, ctx.reduction), *[None] * 5


one_label.register_autograd(_differentiate_one_label, setup_context=_keep_one_label)


def _reduction(size_average: bool | None, reduce: bool | None, reduction: str) -> int:
    """The number of a reduction; the two flags are its older form."""
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    return ("none", "mean", "sum").index(reduction)


def multi_margin_loss(input: Tensor, target: Tensor, p: int = 1, margin: float = 1.0, weight: Tensor | None = None,
                      size_average: bool | None = None, reduce: bool | None = None,
                      reduction: str = "mean") -> Tensor:
    """As `torch.nn.functional` has it."""
    return torch.ops.memopt.multi_margin_loss(
        input, target, p, float(margin), weight, _reduction(size_average, reduce, reduction))


def multilabel_margin_loss(input: Tensor, target: Tensor, size_average: bool | None = None, reduce: bool | None = None,
                           reduction: str = "mean") -> Tensor:
    """As `torch.nn.functional` has it."""
    return torch.ops.memopt.multilabel_margin_loss(input, target, _reduction(size_average, reduce, reduction))[0]
