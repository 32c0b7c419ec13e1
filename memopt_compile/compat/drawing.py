"""Random numbers whose range or share changes from call to call.

In a graph a share is a plain number, and so a constant: each value would be a graph of its own. These operators are
given it as a 0-dim tensor, read it when they run and draw by the kernel that eager draws by: the same numbers of the
generator, and none where eager draws none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

RANDOM = {"mutates_args": (), "tags": (torch.Tag.nondeterministic_seeded,)}


@torch.library.custom_op("memopt::uniform", **RANDOM)
def uniform(like: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.empty_like(like).uniform_(low.item(), high.item())


@torch.library.custom_op("memopt::normal", **RANDOM)
def normal(like: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return torch.empty_like(like).normal_(mean.item(), std.item())


@torch.library.custom_op("memopt::bernoulli", **RANDOM)
def bernoulli(like: Tensor, share: Tensor) -> Tensor:
    return torch.empty_like(like).bernoulli_(share.item())


@torch.library.custom_op("memopt::kept", **RANDOM)
def kept(like: Tensor, rate: Tensor) -> Tensor:
    """Which elements a dropout of this rate keeps: on CUDA eager draws them by a kernel of their own."""
    number = rate.item()
    if not 0 <= number <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {number}")
    if like.is_cuda and 0 < number < 1 and like.numel():
        return torch.native_dropout(like, number, True)[1]
    mask = torch.empty_like(like, dtype=torch.bool)
    return mask.fill_(number == 0) if number in (0, 1) else mask.bernoulli_(1 - number)


for _operator in (uniform, normal, bernoulli):
    _operator.register_fake(lambda like, *numbers: torch.empty_like(like))
kept.register_fake(lambda like, rate: torch.empty_like(like, dtype=torch.bool))

# In-place methods: the operator, and what its numbers are called, with their defaults.
METHODS: dict[str, tuple[Any, dict[str, float]]] = {
    "uniform_": (torch.ops.memopt.uniform.default, {"from": 0.0, "to": 1.0}),
    "normal_": (torch.ops.memopt.normal.default, {"mean": 0.0, "std": 1.0}),
    "bernoulli_": (torch.ops.memopt.bernoulli.default, {"p": 0.5})}


def dropout(x: Tensor, rate: Tensor) -> Tensor:
    scale = torch.where(rate < 1, 1 / (1 - rate), torch.zeros_like(rate))
    return x * torch.ops.memopt.kept(x, rate) * scale


def normal_of_size(mean: Any, std: Any, size: Any, **kind: Any) -> Tensor:
    """``torch.normal(mean, std, size)`` by the method."""
    return torch.empty(size, **kind).normal_(mean, std)
