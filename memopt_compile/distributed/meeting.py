"""Ranks say what they are about to do, before they do it together.

Whatever gathers or scatters is done by all ranks, or by none: one that evaluates alone, ends its loop early, or has
compiled another step makes other collectives than those which wait for it. These would wait till the time-out; or where
sizes happen to agree, take one tensor for another. So ranks compare a word of eight bytes before each compiled
step, before a step is compiled, and before eager code gathers a parameter.

On a CPU only. On other devices ranks would wait for each other's host in every step, for what is queued long before.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..compat import trace
from ..errors import RankError
from . import planned
from .agreement import numbers

TEXT_BYTES = 160
DO = ("have all ranks do the same, one after another: evaluate, save and read parameters on all of them, and end the loop "
      "on all of them in the same step")


def come_together(what: str, mesh: Any, where: str, which: str = "", replicas: bool = True) -> None:
    """Every rank of `mesh` comes here, with the same `what`, and of that the same `which`; without `replicas` those that
    share a model, while others may go on.

    Raises:
        RankError: a rank is about to do something else. All that have come here raise it.
    """
    if planned.active() or mesh.device_type != "cpu":
        return
    word = int.from_bytes(hashlib.sha256((which or what).encode()).digest()[:7])
    if len(set(_exchanged(_buffers(mesh), [word], mesh, replicas))) > 1:
        text = what.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        said = bytes(_exchanged(_made(TEXT_BYTES, torch.uint8, mesh), list(text), mesh))
        others = [said[i:i + TEXT_BYTES].rstrip(b"\0").decode(errors="replace") for i in range(0, len(said), TEXT_BYTES)]
        doing = "; ".join(f"rank {rank} {other}" for rank, other in zip(numbers(mesh), others))
        raise RankError(f"ranks are about to do different things: {doing}", where=where, do=DO)


def _exchanged(buffers: list[Tensor], mine: list[int], mesh: Any, replicas: bool = True) -> list[int]:
    """What all ranks of the mesh give, in its order; without `replicas` it is enough that those along the last
    dimension give the same. `buffers` are for what is gathered along its dimensions, from the last on."""
    # One call under two names: torch 2.13 warns of the older one, which is all that 2.11 has.
    gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
    for place, value in enumerate(mine):
        buffers[0][place] = value
    for dim, (some, more) in zip(reversed(range(mesh.ndim)), itertools.pairwise(buffers)):
        with trace.dispatched_by_cpp():
            gather(more, some, group=mesh.get_group(dim))
        if not replicas and len(set(alike := more.tolist())) == 1:
            return alike
    return buffers[-1].tolist()


_known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by mesh: a step shall need no memory for its word


def _buffers(mesh: Any) -> list[Tensor]:
    if mesh not in _known:
        _known[mesh] = _made(1, torch.int64, mesh)
    return _known[mesh]


def _made(count: int, dtype: torch.dtype, mesh: Any) -> list[Tensor]:
    sizes = itertools.accumulate((mesh.size(dim) for dim in reversed(range(mesh.ndim))), operator.mul, initial=count)
    return [torch.zeros(size, dtype=dtype) for size in sizes]
