"""Checkpoints of one process, loaded where `shard_` has been: each rank takes its rows of them.

``torch.load`` gives every rank whole tensors. PyTorch refuses to copy one into a DTensor, and in an optimizer of
torch.optim would leave whole states beside rows of parameters. These hooks of `load_state_dict` put this rank's
rows in their place, as DTensors. Nothing is sent: all ranks have to load the same file.
(The optimizers of `memopt.optim` do this themselves: `optim.shards`.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..optim.shards import Rows
from ..quantization.parameters import LowPrecisionTensor
from .storage import storage_of


def into_model(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Before a module loads its own entries of `state`, a copy that it may change."""
    for name, p in module._parameters.items():
        if storage_of(p) is not None and prefix + name in state:
            state[prefix + name] = _rows(state[prefix + name], p)


def into_optimizer(opt: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """What an optimizer of torch.optim shall load in place of `state`."""
    made = dict(state["state"])
    for mine, saved in zip(opt.param_groups, state["param_groups"]):
        for p, index in zip(mine["params"], saved["params"]):
            if storage_of(p) is not None and p.dim() and index in made:
                made[index] = {name: _rows(value, p) for name, value in made[index].items()}
    return {**state, "state": made}


def _rows(value: Any, p: DTensor) -> Any:
    """This rank's rows of a whole tensor of the shape of `p`; anything else as it is."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.shape != p.shape:
        return value
    if isinstance(value, LowPrecisionTensor):
        value = value.dequantize()
    here = Rows(p.device_mesh).loaded(value.detach(), p, by_rows=True).to(p.device)
    return DTensor.from_local(here, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
