"""What `shard_` has made of each parameter, for those who compile steps of it.

In every stage the parameter that the optimizer updates is a DTensor, and this rank has its rows. In
stage 3 that is all there is of it between steps. In stages 1 and 2 every rank also keeps the whole
value, `full`, and its own rows are a window into it: they are stored once. A step that is compiled
updates the window and then gathers the rows of all ranks into `full`.

Code that is not compiled knows nothing of that. It reads the rows, and gathers them at every use, so
that it is always right; and if it writes to them (an update in eager, a checkpoint loaded), the rows
of the other ranks in `full` are old. `refresh` sees that by versions: of the parameter, which counts
what is done to the DTensor, and of the rows, which counts what is done to the tensor inside it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


@dataclass
class Storage:
    """How one parameter is kept: `rows` are this rank's, from row `start` of the whole.

    `mesh` has the ranks that share it. `all_ranks` is the mesh that `shard_` was given: the same, or
    one that has replicas of those in its first dimension.
    `full` is the whole value where it is kept (stages 1 and 2), and agrees with the rows of all
    ranks as long as `versions` are those of parameter and rows.
    """

    name: str
    stage: int
    mesh: Any
    all_ranks: Any
    parameter: weakref.ref
    rows: Tensor
    start: int
    full: Tensor | None = None
    versions: tuple[int, int] = (-1, -1)

    def now(self) -> tuple[int, int]:
        return self.parameter()._version, self.rows._version


_known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> Storage


def remember(storage: Storage) -> None:
    _known[storage.parameter()] = storage


def storage_of(parameter: Any) -> Storage | None:
    """How `shard_` has stored this parameter, None if it has not."""
    return _known.get(parameter) if isinstance(parameter, Tensor) else None


def refresh(storages: list[Storage]) -> None:
    """Gather the rows of all ranks into `full`, of those that were written since they agreed.

    Every rank has to come here with the same parameters: what writes to them writes on all ranks.
    """
    for storage in storages:
        if storage.versions != storage.now():
            _gather(storage)
    note(storages)


def note(storages: list[Storage]) -> None:
    """`full` agrees with the rows of all ranks as they are now."""
    for storage in storages:
        storage.versions = storage.now()


def _gather(storage: Storage) -> None:
    """Bring the rows of all ranks into `full`."""
    full, ranks = storage.full, storage.mesh.size()
    each = -(-full.shape[0] // ranks)  # rows a rank; the last ranks may have fewer, or none
    mine = storage.rows.new_zeros((each, *full.shape[1:]))
    mine[:storage.rows.shape[0]].copy_(storage.rows.detach())
    parts = [torch.empty_like(mine) for _ in range(ranks)]
    torch.distributed.all_gather(parts, mine, group=storage.mesh.get_group())
    full.copy_(torch.cat(parts)[:full.shape[0]])
