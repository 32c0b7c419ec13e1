"""The norm of gradients that ranks share, as a captured step computes it.

PyTorch takes a norm of each gradient on each rank. The largest element of none is an error, on the rank that has no rows
of it. Here a rank looks through all that it has, and then ranks through what they found: the same number, one gather.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

OF_ORDER = torch.nn.utils.get_total_norm.__wrapped__  # under its no_grad


def total_norm(tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False,
               foreach: bool | None = None) -> Tensor:
    """`torch.nn.utils.get_total_norm`."""
    with torch.no_grad():
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if float(norm_type) == math.inf and not error_if_nonfinite and _in_rows(tensors):
            return _largest(tensors)
        return OF_ORDER(tensors, norm_type, error_if_nonfinite, foreach)


def _in_rows(tensors: Sequence[Tensor]) -> bool:
    return len(tensors) > 0 and all(
        isinstance(t, DTensor) and t.device_mesh.ndim == 1 and t.placements[0] in (Shard(0), Replicate())
        and t.device_mesh == tensors[0].device_mesh and t.dtype == tensors[0].dtype for t in tensors)


def _largest(tensors: Sequence[Any]) -> Tensor:
    mesh, rows = tensors[0].device_mesh, [t.to_local() for t in tensors]
    found = [part.abs().amax() for part in rows if part.numel() > 0]
    here = torch.stack([*found, rows[0].new_zeros(())]).amax().reshape(1)
    # A gather, as a sum by `max` would lose NaN on some ranks.
    return DTensor.from_local(here, mesh, [Shard(0)], run_check=False).redistribute(placements=[Replicate()]).amax()
