"""An activation that all ranks of a group have alike, in parts: `memopt::part`, and the whole again.

    mine = part(x, rank, ranks)                         its elements in the order of its memory
    x = view of wait_tensor(all_gather(mine, ranks))    bit for bit
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from .collectives import GATHER, WAIT
from .compat.trace import hinted
from .compression import is_dense, layout
from .distributed.tensor_parallel import Group
from .step_graph import Phase, StepGraph

RANKS, RANKS_HOST = "ranks", "ranks, host"  # the forms of an activation whose parts wait here, or on the host
KINDS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@torch.library.custom_op("memopt::part", mutates_args=())
def part(value: Tensor, rank: int, ranks: int) -> Tensor:
    """A copy of part `rank` of `ranks` equal ones of a dense tensor, as a vector."""
    length = value.numel() // ranks
    return value.as_strided((length,), (1,), value.storage_offset() + rank * length).clone()


@part.register_fake
def _(value: Tensor, rank: int, ranks: int) -> Tensor:
    return value.new_empty(value.numel() // ranks)


PART = torch.ops.memopt.part.default


def can_be_parted(value: object, ranks: int) -> bool:
    return (isinstance(value, Tensor) and value.dtype in KINDS and is_dense(value)
            and hinted(value.numel()) % ranks == 0)


def gathered(step: StepGraph, value: fx.Node, mine: fx.Node, group: Group) -> fx.Node:
    """The value again, made where the graph inserts now from this rank's part."""
    launch = step.call(value, GATHER, mine, group.ranks, group.name)
    whole = step.call(value, WAIT, launch)
    step.phases[launch] = step.phases[whole] = Phase.BACKWARD
    sizes, strides, _ = layout(value.meta["val"])
    return step.call(value, torch.ops.aten.as_strided.default, whole, sizes, strides, 0)
