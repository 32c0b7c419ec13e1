"""What a tensor subclass needs of PyTorch's private parts. Checked against torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["no_torch_function", "on_tensors", "pytree", "wrapper"]

no_torch_function = torch._C._disabled_torch_function_impl


def wrapper(cls: type, size: Sequence[int], dtype: torch.dtype, device: torch.device,
            requires_grad: bool) -> Any:
    """A tensor of class `cls` without memory of its own, contiguous by its strides."""
    return torch.Tensor._make_wrapper_subclass(
        cls, tuple(size), dtype=dtype, device=device, requires_grad=requires_grad)


def on_tensors(cls: type, function: Any, nest: Any) -> Any:
    """`nest` with `function` of every tensor of class `cls` in it."""
    return pytree.tree_map_only(cls, function, nest)
