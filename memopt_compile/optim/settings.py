"""The settings that all optimizers of this package have, and what is refused of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from .base import Optimizer

# How torch's classes can be told to run their update. Here it is always one tensor at a time.
FLAGS = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
COMMON = {"maximize": False, "skip_nonfinite": False, "max_norm": None, "state_bits": 32,
          "weight_bits": None, "gradient_bits": 32, "rounding_seed": 0, **FLAGS}
INSTEAD = {
    "foreach": "leave it out: an update of all tensors at once keeps every gradient alive",
    "fused": "leave it out: torch.compile fuses the update",
    "capturable": "leave it out: torch.compile captures the step as it is",
    "differentiable": "use the class of torch.optim to differentiate through a step",
}


def check_common(optimizer: Optimizer, group: Mapping[str, Any]) -> None:
    """Refuse settings of a group that are out of range."""
    for flag in FLAGS:
        if group.get(flag):
            raise optimizer.error(f"{flag}=True is not supported", INSTEAD[flag])
    if group["state_bits"] not in (32, 16, 8, 4, 1):
        raise optimizer.error(f"state_bits is {group['state_bits']}", "choose 32, 16, 8, 4 or 1")
    if group["weight_bits"] not in (None, 16, 24, 32):
        raise optimizer.error(f"weight_bits is {group['weight_bits']}", "choose None, 16, 24 or 32")
    if group["gradient_bits"] not in (32, 8):
        raise optimizer.error(f"gradient_bits is {group['gradient_bits']}", "choose 32 or 8")
    if group["gradient_bits"] != 32 and not optimizer.keeps_gradients:
        raise optimizer.error("it has no gradients to keep in few bits", "leave gradient_bits out")
    if not (isinstance(group["rounding_seed"], int) and 0 <= group["rounding_seed"] < 2**32):
        raise optimizer.error(f"rounding_seed is {group['rounding_seed']}",
                              "choose an integer from 0 to 2**32 - 1")
    if group["max_norm"] is not None and not group["max_norm"] > 0:
        raise optimizer.error(f"max_norm is {group['max_norm']}", "choose a norm above 0, or None")
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise optimizer.error(f"lr has {lr.numel()} elements", "give a number or a tensor of one")
    optimizer.check_at_least(group, "lr", 0)
    optimizer.check_at_least(group, "weight_decay", 0)


def check(optimizer: Optimizer, group: Mapping[str, Any]) -> None:
    """Refuse settings of a group by name, those of a type that no number has included."""
    try:
        optimizer.check(group)
    except TypeError as error:
        given = ", ".join(f"{name}={value!r}" for name, value in group.items() if name != "params")
        raise optimizer.error(f"a setting is of the wrong type ({error}): {given}",
                              "give what the class's documentation names") from error


def two_eps(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[Any, Any]:
    """ε₁ and ε₂ of an optimizer that factors: what Adam calls `eps` is one number."""
    eps = group["eps"]
    if not isinstance(eps, tuple | list) or len(eps) != 2:
        raise optimizer.error(f"eps is {eps}", "give two numbers, ε₁ of squared gradients and ε₂, or leave it out")
    return eps[0], eps[1]
