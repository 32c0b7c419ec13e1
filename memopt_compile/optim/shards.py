"""Where the rows of a parameter are: all in this process, or, with ZeRO, some on each rank.

An optimizer computes on the rows that are here, and its state is of those. What its update needs of the
parameter as a whole (a norm, the means of a factored moment) is summed up over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Whole:
    """Every parameter is here."""

    ranks = 1

    def local(self, value: Tensor) -> Tensor:
        """What is here of a parameter, or of its gradient."""
        return value

    def largest(self, shape: Sequence[int]) -> int:
        """Elements of the largest part that a rank has of a parameter of this shape."""
        return math.prod(shape)

    def total(self, value: Tensor, p: Tensor) -> Tensor:
        """The sum over the ranks of what each has found in its rows of `p`."""
        return value

    def everywhere(self, holds: Tensor, p: Tensor) -> Tensor:
        """Whether a condition on the rows of `p`, 0-dim, holds on every rank."""
        return holds

    def saved(self, state: Tensor, p: Tensor) -> Tensor:
        """A state that has the rows of `p` as a checkpoint has it: as a whole."""
        return state

    def loaded(self, state: Tensor, p: Tensor, by_rows: bool) -> Tensor:
        """What is here of a state as a checkpoint has it."""
        return state


WHOLE = Whole()


class Rows(Whole):
    """Parameters are DTensors `Shard(0)` on a mesh of one dimension, of which a state has the local rows
    as a plain tensor. (One without a dimension is on every rank, and nothing is summed up.)"""

    def __init__(self, mesh: Any) -> None:
        from torch.distributed.tensor import DTensor, Replicate, Shard  # takes a while to load

        self.kind, self.by_rows, self.everyone = DTensor, (Shard(0),), (Replicate(),)
        self.mesh, self.ranks, self.group = mesh, mesh.size(), mesh.get_group().group_name

    def local(self, value: Tensor) -> Tensor:
        if not isinstance(value, self.kind):
            return value
        placed = self.by_rows if value.dim() else self.everyone
        if value.placements != placed:  # a gradient that the user has put there
            value = value.redistribute(placements=placed)
        return value.to_local()

    def largest(self, shape: Sequence[int]) -> int:
        return -(-shape[0] // self.ranks) * math.prod(shape[1:]) if shape else 1

    def total(self, value: Tensor, p: Tensor) -> Tensor:
        if not p.dim():
            return value
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_reduce(value.contiguous(), "sum", self.group))

    def everywhere(self, holds: Tensor, p: Tensor) -> Tensor:
        return self.total((~holds).to(p.device, torch.float32), p) == 0

    def saved(self, state: Tensor, p: Tensor) -> Tensor:
        if not (state.dim() and p.dim()):
            return state
        shape = (p.shape[0], *state.shape[1:])
        stride = tuple(math.prod(shape[d + 1:]) for d in range(len(shape)))
        return self.kind.from_local(state, self.mesh, list(self.by_rows), run_check=False,
                                    shape=torch.Size(shape), stride=stride)

    def loaded(self, state: Tensor, p: Tensor, by_rows: bool) -> Tensor:
        by_rows = by_rows and p.dim() > 0
        if isinstance(state, self.kind):
            placed = self.by_rows if by_rows and state.dim() else self.everyone
            return state.redistribute(placements=list(placed)).to_local().clone()
        if not by_rows or not state.dim():
            return state.clone()
        each, here = -(-p.shape[0] // self.ranks), self.mesh.get_local_rank()
        return state[here * each:(here + 1) * each].clone()
