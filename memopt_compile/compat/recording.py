"""CUDA graphs that could not be recorded."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def give_up_pool(device: torch.device, pool: Any) -> None:
    """Undo what PyTorch leaves when a recording into `pool` fails: its allocator would still wait for the end, and
    never give the memory back."""
    with contextlib.suppress(RuntimeError):  # it did end, and the graph gives the memory back
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
