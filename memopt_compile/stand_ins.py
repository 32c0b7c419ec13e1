"""Made-up tensors in the place of fake ones, to run one operator by itself and see what it costs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .compat.trace import hinted, pytree

RANDOM = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def stand_ins(nest: Any, device: torch.device | str | None = None, random: bool = False,
              apart: bool = False) -> Any:
    """`nest` with a real tensor for each fake one, and a plain number for each symbolic one.

    The tensors are on `device`, each on its own by default. Zeros are valid indices and valid numbers alike;
    a single float is 1, a setting that is not off, and of a mask all is true, so that no choice by it is larger.
    With `random`, floats are spread over [0, 1), for operators whose time depends on values, such as sorting: valid
    probabilities, and valid under roots. With `apart`, numbers are 1, 2 and so on, for operators that count what is
    not zero, or not the same.
    Call it inside `compat.trace.real_tensors`.
    """
    def made(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return hinted(value)
        elements = hinted(value.untyped_storage().nbytes()) // value.element_size()
        storage = torch.zeros(max(1, elements), dtype=value.dtype, device=device or value.device)
        if value.dtype == torch.bool:
            storage.fill_(True)  # a mask that keeps all
        elif apart:
            storage.copy_(torch.arange(1, 1 + len(storage)))
        elif value.dtype in RANDOM and (random or value.dim() == 0):
            storage.uniform_() if random else storage.fill_(1)
        return storage.as_strided(tuple(map(hinted, value.shape)), tuple(map(hinted, value.stride())),
                                  hinted(value.storage_offset()))

    return pytree.tree_map(made, nest)


def copies(nest: Any) -> Any:
    """`nest` with tensors that have storages of their own, laid out alike."""
    return pytree.tree_map_only(
        Tensor, lambda t: torch.empty(0, dtype=t.dtype, device=t.device).set_(
            t.untyped_storage().clone(), t.storage_offset(), t.shape, t.stride()), nest)
