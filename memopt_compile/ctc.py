"""The loss of connectionist temporal classification (Graves et al., 2006) by PyTorch's kernels, as operators of ours.

PyTorch's operator gives all forward variables beside the loss: as many as the longest target asks for, so that a trace,
which knows no number of a tensor, cannot say how large they are. Here lengths are read as the operators run, and
backward computes these variables again, which eager keeps from forward on: the kernel of forward runs twice. On a CPU,
whose kernel gives each sample to one thread, only as many samples as there are threads have them at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _slabs(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor) -> Iterator[tuple[slice, tuple]]:
    """Which samples go together, and the kernel's first operands for them. The last slab has what is left, so that
    lengths which do not fit the targets are PyTorch's errors."""
    samples, of_inputs, of_targets = log_probs.shape[1], input_lengths.tolist(), target_lengths.tolist()
    begins = [0, *accumulate(of_targets)]
    together = torch.get_num_threads() if log_probs.device.type == "cpu" else max(1, samples)
    for at in range(0, max(1, samples), together):
        here = slice(at, at + together if at + together < samples else None)
        rows = here if targets.dim() > 1 else slice(begins[at], here.stop and begins[here.stop])
        yield here, (log_probs[:, here], targets[rows], of_inputs[here], of_targets[here])


@torch.library.custom_op("memopt::ctc_loss", mutates_args=())
def forward(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int,
            zero_infinity: bool) -> Tensor:
    """The loss of each sample [B], of log_probs [T, B, C]."""
    return torch.cat([aten._ctc_loss(*operands, blank, zero_infinity)[0]
                      for _, operands in _slabs(log_probs, targets, input_lengths, target_lengths)])


@torch.library.custom_op("memopt::ctc_loss_backward", mutates_args=())
def backward(grad: Tensor, log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor,
             blank: int, zero_infinity: bool) -> Tensor:
    """The gradient of log_probs [T, B, C], of that of each sample's loss [B]."""
    result = None
    for here, operands in _slabs(log_probs, targets, input_lengths, target_lengths):
        found = aten._ctc_loss(*operands, blank, zero_infinity)
        part = aten._ctc_loss_backward(grad[here], *operands, *found, blank, zero_infinity)
        if here == slice(0, None):  # all of them at once
            return part
        result = log_probs.new_empty(log_probs.shape) if result is None else result
        result[:, here] = part
    return result


@forward.register_fake
def _(log_probs: Tensor, *others: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@backward.register_fake
def _(grad: Tensor, log_probs: Tensor, *others: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


def _keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple:
    return backward(grad, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity), *[None] * 5


forward.register_autograd(_differentiate, setup_context=_keep)


def longest(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor) -> None:
    """Give made-up lengths the largest values. Of targets one behind the other some may be as long as their input."""
    most = len(log_probs)
    input_lengths.fill_(most)
    if targets.dim() > 1:
        target_lengths.fill_(targets.shape[1])
        return
    for i in range(len(target_lengths)):  # all together they are what is there
        target_lengths[i] = max(0, min(most, len(targets) - i * most))
    target_lengths[-1:] += len(targets) - target_lengths.sum()


def ctc_loss(log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
             reduction: str = "mean", zero_infinity: bool = False) -> Tensor:
    """As `torch.nn.functional` has it."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if torch.is_autocast_enabled(log_probs.device.type):  # which has this loss in float32
        log_probs = log_probs.float()
    batched = log_probs.dim() == 3
    log_probs = log_probs if batched else log_probs.unsqueeze(1)
    lengths = [(each if isinstance(each, Tensor) else torch.tensor(list(each))).reshape(-1)
               for each in (input_lengths, target_lengths)]
    loss = torch.ops.memopt.ctc_loss(log_probs, targets.to(log_probs.device, torch.int64), *lengths, blank, zero_infinity)
    if zero_infinity:
        loss = torch.where(loss == float("inf"), torch.zeros_like(loss), loss)
    if reduction == "mean":
        return (loss / lengths[1].to(loss.device, loss.dtype).clamp(min=1)).mean()
    return loss.sum() if reduction == "sum" else loss if batched else loss.squeeze(0)
