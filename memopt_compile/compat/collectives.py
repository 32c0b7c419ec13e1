"""A gather of several tensors into tensors that are there, which torch's functional collectives lack.

Private in torch.distributed are finding a group by its name, the coalesced gather of a process group, and the
registry in which `wait_tensor` looks up what it waits for. Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["GATHERS_INTO"]

_library = torch.library.Library("memopt", "FRAGMENT")
_library.define("all_gather_into_tensor_coalesced_out(Tensor[] inputs, int group_size, str group_name, *, "
                "Tensor(a!)[] out) -> Tensor(a!)[]")


def _launch(inputs: Sequence[Tensor], group_size: int, group_name: str, *, out: Sequence[Tensor]) -> list[Tensor]:
    group = torch.distributed.distributed_c10d._resolve_process_group(group_name)
    work = group.allgather_into_tensor_coalesced(list(out), list(inputs))
    for tensor in out:
        torch._C._distributed_c10d._register_work(tensor, work)
    return list(out)


_library.impl("all_gather_into_tensor_coalesced_out", _launch, "CPU")
_library.impl("all_gather_into_tensor_coalesced_out", _launch, "CUDA")
_library.impl("all_gather_into_tensor_coalesced_out", lambda inputs, group_size, group_name, *, out: list(out), "Meta")
GATHERS_INTO = torch.ops.memopt.all_gather_into_tensor_coalesced_out.default
