"""Copies and files of DTensors whose rows are a window into the whole parameter (stages 1 and 2).

PyTorch tells a DTensor, which has no memory of its own, by the address 0. With a window inside it the address is
where the window begins, and `copy.deepcopy` and `torch.save` fail, on all ranks but the first; and what the first one
saves is the whole. So these methods are wrapped in the first call of `shard_`, for DTensors of models that are shared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import wrapping


def let_windows_be_copied(meshes: Any) -> None:
    """From now on DTensors over one of `meshes` are copied and pickled with their rows alone."""
    def deepcopy_of(inherited: Any) -> Any:
        def deepcopy(t: DTensor, memo: dict) -> DTensor:
            return memo[id(t)] if id(t) in memo else copied(t, memo) if _is_window(t, meshes) else inherited(t, memo)

        return deepcopy

    def reduce_of(inherited: Any) -> Any:
        def reduce(t: DTensor, protocol: Any) -> Any:
            return inherited(apart(t) if _is_window(t, meshes) else t, protocol)

        return reduce

    wrapping.replace(DTensor, "__deepcopy__", deepcopy_of)
    wrapping.replace(DTensor, "__reduce_ex__", reduce_of)


def copied(t: DTensor, memo: dict) -> DTensor:
    """`t` with rows of its own, and so its gradient, as `copy.deepcopy` gives it."""
    new = nn.Parameter(apart(t), t.requires_grad) if isinstance(t, nn.Parameter) else apart(t)
    memo[id(t)] = new
    new.grad = None if t.grad is None else apart(t.grad)
    return new


def apart(t: DTensor) -> DTensor:
    """`t` with rows of its own."""
    with torch.no_grad():
        new = DTensor.from_local(t.to_local().clone(), t.device_mesh, t.placements, run_check=False, shape=t.shape,
                                 stride=t.stride())
    return new.requires_grad_(t.requires_grad)


def _is_window(t: DTensor, meshes: Any) -> bool:
    if t.device_mesh not in meshes or not t.is_leaf:
        return False
    with torch.no_grad():
        rows = t.to_local()
    return type(rows) in (Tensor, nn.Parameter) and rows.nbytes < rows.untyped_storage().nbytes()
