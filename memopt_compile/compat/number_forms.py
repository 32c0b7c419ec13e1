"""Functions of torch's whose number changes from call to call, of operators that take a tensor for it.

In a graph such a number is a constant where torch's own operator wants it, and a graph for each of its values. The
results are those of the operator up to rounding, and so are the derivatives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _as_tensor(number: Any, like: Tensor) -> Tensor:
    """A number beside `like`, whose type the result has: as a 0-dim tensor in float64 unless `like` is one too."""
    value = torch.ones((), dtype=torch.float64) * number
    return value if like.dim() else value.to(like.dtype)


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()


def _chosen(condition: Tensor, input: Tensor, other: Tensor, inplace: bool) -> Tensor:
    result = torch.where(condition, input, other)
    return input.copy_(result) if inplace else result


def leaky_relu(input: Tensor, negative_slope: Any = 0.01, inplace: bool = False) -> Tensor:
    return _chosen(input > 0, input, input * _as_tensor(negative_slope, input), inplace)


def elu(input: Tensor, alpha: Any = 1.0, inplace: bool = False) -> Tensor:
    below = input <= 0
    small = torch.where(below, input, 0.0)  # no branch of a large one's own exponential, whose derivative is infinite
    return _chosen(~below, input, torch.expm1(small) * _as_tensor(alpha, input), inplace)


def softplus(input: Tensor, beta: Any = 1.0, threshold: Any = 20.0) -> Tensor:
    number = _as_tensor(beta, input)
    scaled = input * number
    small = torch.where(scaled > threshold, 0.0, scaled)
    return torch.where(scaled > threshold, input, torch.log1p(torch.exp(small)) / number)


def hardtanh(input: Tensor, min_val: Any = -1.0, max_val: Any = 1.0, inplace: bool = False) -> Tensor:
    """The derivative is zero at both ends, where that of a clamp is one."""
    if min_val > max_val:
        raise ValueError("min_val cannot be greater than max_val")
    inside = ~((input <= min_val) | (input >= max_val))
    return _chosen(inside, input, input.detach().clamp(min_val, max_val), inplace)


def margin_ranking_loss(input1: Tensor, input2: Tensor, target: Tensor, margin: Any = 0, *,
                        reduction: str = "mean") -> Tensor:
    return _reduced((margin - target * (input1 - input2)).clamp_min(0), reduction)


def hinge_embedding_loss(input: Tensor, target: Tensor, margin: Any = 1.0, *, reduction: str = "mean") -> Tensor:
    zeros = torch.zeros_like(input)
    far = torch.where(target != 1, (margin - input).clamp_min(0), zeros)
    return _reduced(far + torch.where(target != -1, input, zeros), reduction)


def triplet_margin_loss(anchor: Tensor, positive: Tensor, negative: Tensor, margin: Any = 1.0, p: float = 2,
                        eps: float = 1e-6, swap: bool = False, *, reduction: str = "mean") -> Tensor:
    near, far = F.pairwise_distance(anchor, positive, p, eps), F.pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, F.pairwise_distance(positive, negative, p, eps))
    return _reduced((near - far + margin).clamp_min(0), reduction)


def cosine_embedding_loss(input1: Tensor, input2: Tensor, target: Tensor, margin: Any = 0, *,
                          reduction: str = "mean") -> Tensor:
    dim = target.dim()
    squares = [each.square().sum(dim) + 1e-12 for each in (input1, input2)]
    cosine = (input1 * input2).sum(dim) / (squares[0] * squares[1]).sqrt()
    zeros = torch.zeros_like(cosine)
    near = torch.where(target == 1, 1 - cosine, zeros)
    return _reduced(near + torch.where(target == -1, (cosine - margin).clamp_min(0), zeros), reduction)


def layer_norm(input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5) -> Tensor:
    variance, mean = torch.var_mean(input, tuple(range(-len(normalized_shape), 0)), correction=0, keepdim=True)
    result = (input - mean) * torch.rsqrt(variance + eps)
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


def quantile(input: Tensor, q: Any, dim: Any = None, keepdim: bool = False, *, interpolation: str = "linear") -> Tensor:
    share = torch.ones((), dtype=input.dtype, device=input.device) * q
    return torch.quantile(input, share, dim, keepdim, interpolation=interpolation)


def linspace(start: Any, end: Any, steps: int, *, dtype: Any = None, device: Any = None) -> Tensor:
    """From both ends, as the kernel counts."""
    if steps < 2:
        return torch.full((steps,), start, dtype=dtype, device=device)
    place = torch.arange(steps, dtype=dtype or torch.get_default_dtype(), device=device)
    width = (torch.ones((), dtype=place.dtype, device=place.device) * end - start) / (steps - 1)
    return torch.where(place < steps // 2, place * width + start, end - (steps - 1 - place) * width)


def huber_loss(input: Tensor, target: Tensor, reduction: str = "mean", delta: Any = 1.0) -> Tensor:
    if not delta > 0:
        raise RuntimeError("huber_loss does not support non-positive values for delta.")
    error = (input - target).abs()
    number = _as_tensor(delta, error)
    small = torch.minimum(error, number)  # no branch of an infinite error's own square, whose derivative is NaN
    return _reduced(0.5 * small * small + number * (error - small), reduction)


def smooth_l1_loss(input: Tensor, target: Tensor, *, reduction: str = "mean", beta: Any = 1.0) -> Tensor:
    if beta < 0:
        raise RuntimeError("smooth_l1_loss does not support negative values for beta.")
    error = (input - target).abs()
    if beta == 0:
        return _reduced(error, reduction)
    number = _as_tensor(beta, error)
    small = torch.minimum(error, number)
    return _reduced(0.5 * small * small / number + (error - small), reduction)


def cross_entropy(input: Tensor, target: Tensor, weight: Any = None, *, ignore_index: int = -100,
                  reduction: str = "mean", label_smoothing: Any = 0.0) -> Tensor:
    """It is linear in how much labels are smoothed."""
    if not 0 <= label_smoothing <= 1:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    given = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}
    plain = F.cross_entropy(input, target, **given)
    if label_smoothing == 0:
        return plain
    smooth = F.cross_entropy(input, target, **given, label_smoothing=1.0)
    share = torch.ones((), dtype=torch.float64) * label_smoothing
    return plain * (1 - share).to(plain.dtype) + smooth * share.to(plain.dtype)


def batch_norm(input: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
               training: bool = False, momentum: Any = 0.1, eps: float = 1e-5) -> Tensor:
    if not training or running_mean is None:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, 0.0, eps)
    mean, variance = torch.zeros_like(running_mean), torch.zeros_like(running_var)
    result = F.batch_norm(input, mean, variance, weight, bias, True, 1.0, eps)
    with torch.no_grad():
        for running, of_batch in ((running_mean, mean), (running_var, variance)):
            share = _as_tensor(momentum, running)
            running.copy_((1 - share) * running + share * of_batch)
    return result


def where(condition: Tensor, input: Any, other: Any) -> Tensor:
    tensors = [each for each in (input, other) if isinstance(each, Tensor)]
    floating = len(tensors) > 0 and (tensors[0].is_floating_point() or tensors[0].is_complex())
    dtype = tensors[0].dtype if floating else torch.get_default_dtype()
    return torch.where(condition, *(each if isinstance(each, Tensor) else (
        torch.ones((), dtype=torch.float64, device=condition.device) * each).to(dtype) for each in (input, other)))


def full(size: Any, fill_value: Any, **kind: Any) -> Tensor:
    return torch.empty(size, **kind).fill_(fill_value)


def full_like(input: Tensor, fill_value: Any, **kind: Any) -> Tensor:
    return torch.empty_like(input, **kind).fill_(fill_value)


def tensor(data: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    if isinstance(data, list | tuple):
        return torch.stack([tensor(each, dtype=dtype, device=device) for each in data])
    return torch.empty((), dtype=dtype or torch.get_default_dtype(), device=device).fill_(data)


def new_full(self: Tensor, size: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    return self.new_empty(size, dtype=dtype, device=device).fill_(fill_value)


def subtract_from(self: Tensor, number: Any) -> Tensor:
    """``number - tensor``"""
    return -self + number


def power_of(self: Tensor, number: Any) -> Tensor:
    """``number ** tensor``"""
    base = torch.ones((), dtype=torch.float64, device=self.device) * number
    return torch.pow(base.to(self.dtype), self)


def fits(form: Callable, count: int, names: Iterable[str]) -> bool:
    """Whether a form takes `count` arguments by their place and others by these names."""
    code = form.__code__
    known = code.co_varnames[:code.co_argcount + code.co_kwonlyargcount]
    return count <= code.co_argcount and (bool(code.co_flags & inspect.CO_VARKEYWORDS) or set(names) <= set(known))


FORMS: dict[Any, Callable] = {
    F.leaky_relu: leaky_relu, F.huber_loss: huber_loss, F.smooth_l1_loss: smooth_l1_loss, F.cross_entropy: cross_entropy,
    F.elu: elu, F.softplus: softplus, F.hardtanh: hardtanh,
    F.margin_ranking_loss: margin_ranking_loss, F.hinge_embedding_loss: hinge_embedding_loss,
    F.triplet_margin_loss: triplet_margin_loss, F.cosine_embedding_loss: cosine_embedding_loss,
    F.layer_norm: layer_norm, torch.linspace: linspace,
    F.batch_norm: batch_norm, torch.where: where, torch.full: full, torch.full_like: full_like, torch.tensor: tensor}
METHODS: dict[str, Callable] = {"new_full": new_full}
if torch.__version__ >= "2.12":  # which traces one of a tensor's share
    FORMS[torch.quantile] = METHODS["quantile"] = quantile
