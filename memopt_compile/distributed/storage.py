"""What `shard_` has made of each parameter, for those who compile steps of it.

In every stage the parameter that the optimizer updates is a DTensor, and this rank has its rows. In
stage 3 that is all there is of it between steps. In stages 1 and 2 every rank also keeps the whole
value, and its own rows are a window into it: they are stored once. A step that is compiled
updates the window and then gathers the rows of all ranks into the whole.

Code that is not compiled knows nothing of that. It reads the rows, and gathers them at every use, so
that it is always right; and if it writes to them (an update in eager, a checkpoint loaded), the rows
of the other ranks in the whole are old. `refresh` sees that by versions: of the parameter, which counts
what is done to the DTensor, and of the rows, which counts what is done to the tensor inside it.

Kernels that write to a list of tensors (`foreach`, `fused`) count nothing of a DTensor, nor does torch.distributed.checkpoint,
which writes to the rows of what `state_dict()` gave out. What an optimizer in eager writes, and a load, is counted by
`count_updates` and `count_load`.

Two ways of writing it does not see: `torch._foreach_mul_(parameters, ..)` outside of an optimizer, and `p.data.zero_()`. `p.data` is another DTensor with a count of its own, and below
DTensor's operators nothing is counted. To see it, rows would have to be read in every step (docs/zero.md warns).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary


class Kept(NamedTuple):
    """A tensor that every rank has whole (stages 1 and 2). This rank's `rows` are a window into `full` from
    its row `start` on, and each rank has `each` of them; the last ones may have fewer, or none."""

    rows: Tensor
    full: Tensor
    start: int
    each: int


@dataclass
class Storage:
    """How one parameter is kept.

    `mesh` has the ranks that share it. `all_ranks` is the mesh that `shard_` was given: the same, or
    one that has replicas of those in its first dimension.
    `kept` has what is whole here: the parameter, or in low precision each part of it. It agrees with the
    rows of all ranks as long as `versions` are those of parameter and rows.
    """

    name: str
    stage: int
    mesh: Any
    all_ranks: Any
    parameter: weakref.ref
    kept: Sequence[Kept] = ()
    versions: tuple[int, ...] = ()

    def now(self) -> tuple[int, ...]:
        return self.parameter()._version, *(each.rows._version for each in self.kept)


_known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> Storage


def remember(storage: Storage) -> None:
    _known[storage.parameter()] = storage


def storage_of(parameter: Any) -> Storage | None:
    """How `shard_` has stored this parameter, None if it has not."""
    return _known.get(parameter) if isinstance(parameter, Tensor) else None


def any_known() -> bool:
    """Whether `shard_` has shared a parameter that is still there."""
    return len(_known) > 0


@functools.cache
def count_updates() -> None:
    """From now on each step of an optimizer that is not captured counts as a write to what is kept whole."""
    @torch.compiler.disable
    def count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if (storage := storage_of(p)) is not None and storage.kept:
                    torch.autograd.graph.increment_version(p)

    count.only_checks = True  # type: ignore[attr-defined]
    register_optimizer_step_pre_hook(count)


def count_load(chunks: Any) -> Any:
    """`DTensor.__create_chunk_list__`, asked before a load writes to the DTensor, which shares its count with the parameter."""
    @functools.wraps(chunks)
    def counted(self: Any) -> Any:
        torch.autograd.graph.increment_version(self)
        return chunks(self)

    return counted


def refresh(storages: list[Storage]) -> None:
    """Gather the rows of all ranks into the whole, of those that were written since they agreed.

    Every rank has to come here with the same parameters: what writes to them writes on all ranks.
    """
    for storage in storages:
        if storage.versions != storage.now():
            _gather(storage)
    note(storages)


def note(storages: list[Storage]) -> None:
    """The whole agrees with the rows of all ranks as they are now."""
    for storage in storages:
        storage.versions = storage.now()


def window(rows: Tensor, start: int, each: int, total: int) -> Kept:
    """`rows` in the memory of a whole of `total` rows. A window without being a view: autograd and Dynamo
    see a tensor of its own."""
    full = torch.zeros((total, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    part = torch.empty(0, dtype=rows.dtype, device=rows.device).set_(
        full.untyped_storage(), start * full.stride(0), rows.shape, full.stride())
    return Kept(part.copy_(rows), full, start, each)


def _gather(storage: Storage) -> None:
    """Bring the rows of all ranks into what is kept whole."""
    ranks = storage.mesh.size()
    for rows, full, _, each in storage.kept:
        mine = rows.new_zeros((each, *full.shape[1:]))
        mine[:rows.shape[0]].copy_(rows.detach())
        parts = [torch.empty_like(mine) for _ in range(ranks)]
        torch.distributed.all_gather(parts, mine, group=storage.mesh.get_group())
        full.copy_(torch.cat(parts)[:full.shape[0]])
