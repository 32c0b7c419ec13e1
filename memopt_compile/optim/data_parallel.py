"""AdamA on M ranks: the states are summed up once a mini-batch, not each micro-batch's gradients.

Appendix B. With N micro-batches a rank, g = ∇f/N, and the old v taken M times:

    each rank:  m ← β₁m + (1−β₁)Σg          v ← M·β₂v + s·(1−β₂)Σg²
    together:   m ← sum of the m / M         v ← sum of the v / M²

v is then (M·M·β₂v + s·(1−β₂)Σ(∇f/N)²)/M² = β₂v + s·(1−β₂)Σ(∇f/(NM))², the sum over all ranks: one
process with N·M micro-batches.

States travel in buckets of a fixed size, cut from the parameters in their order: small ones share
a bucket, large ones are spread over several, and no more than a bucket is held beside the states.
The layout depends on nothing but shapes and settings, so that all ranks make the same calls, with
a step that is captured or runs in eager. With each slab travels a count of the ranks that have
folded a gradient into it: where that is 0 the parameter was unused everywhere, and is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..quantization.parameters import LowPrecisionTensor
from .base import Options
from .low_bit import compressed, precise, read, write
from .slabs import Slab, cut, sliced

if TYPE_CHECKING:
    from .adama import AdamA

BUCKET = 16 << 20  # bytes of moments in one call
MOMENTS = ("exp_avg", "exp_avg_sq")


class Piece(NamedTuple):
    """One slab of a parameter's moments, `folded` if this rank has a gradient in it."""

    p: Tensor
    group: Options
    slab: Slab | None
    folded: bool

    def count(self) -> int:
        return math.prod(cut(self.p, self.slab).shape)


def size(optimizer: AdamA, process_group: Any) -> int:
    """M, the ranks of the group."""
    if not torch.distributed.is_available() or not isinstance(
            process_group, torch.distributed.ProcessGroup):
        raise optimizer.error(
            f"process_group is {process_group!r}", "give a group that this rank is in, such as "
            "torch.distributed.group.WORLD (after init_process_group) or a mesh's get_group()")
    return torch.distributed.get_world_size(process_group)


def check_alike(optimizer: AdamA, groups: Sequence[Options]) -> None:
    """Refuse, on all ranks, parameters or settings that are not the same on all of them.

    Values are compared by their norms: an equal seed or a broadcast makes them equal, and a
    different start, which nothing would ever correct, is far from it.
    """
    if any(isinstance(p, LowPrecisionTensor) for group in groups for p in group["params"]):
        raise optimizer.error("states of low-precision parameters cannot be summed over ranks",
                              "leave process_group out, or memopt.quantize_parameters_")
    shapes, norms = [], []
    for group in groups:
        settings = {name: float(value) if torch.is_tensor(value) else value
                    for name, value in group.items() if name != "params"}
        shapes.append((settings, [(tuple(p.shape), p.dtype, p.requires_grad) for p in group["params"]]))
        norms += [float(torch.linalg.vector_norm(p.detach(), dtype=precise(p)))
                  for p in group["params"]]
    found: list[Any] = [None] * optimizer.ranks
    torch.distributed.all_gather_object(found, (shapes, norms), group=optimizer.process_group)
    for rank, (others, theirs) in enumerate(found):
        if others != found[0][0]:
            raise optimizer.error(f"parameters or settings of rank {rank} are not those of rank 0",
                                  "build the same model and optimizer on every rank")
        for i, (a, b) in enumerate(zip(found[0][1], theirs)):
            if not math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-30):
                raise optimizer.error(
                    f"parameter {i} of rank {rank} does not begin with the values of rank 0",
                    "broadcast the parameters, or load one checkpoint, before making the optimizer")


def reduce_states(optimizer: AdamA) -> None:
    """Sum up the moments over all ranks: ahead of the update, behind the last gradient."""
    found = pieces(optimizer)
    whole = not torch.compiler.is_compiling() or all([piece.folded for piece in found])
    (_reduce if whole else _in_eager)(optimizer, found)


def _reduce(optimizer: AdamA, found: list[Piece]) -> None:
    for bucket in buckets(found):
        sums = _sum(optimizer, torch.cat([x for piece in bucket for x in _share(optimizer, piece)]))
        at = 0
        for piece in bucket:
            end = at + 1 + 2 * piece.count()
            _take(optimizer, piece, sums[at:end])
            at = end
        del sums  # before the next bucket is packed


# A graph cannot ask a number whether some other rank has used a parameter.
_in_eager = torch.compiler.disable(_reduce, reason=(
    "a parameter of AdamA has no gradient on this rank, and only the other ranks know whether it "
    "has one there"))


def pieces(optimizer: AdamA) -> list[Piece]:
    """The moments of all parameters that are trained, in slabs."""
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad and p.numel():
                folded = p in optimizer.state and optimizer.state[p].get("folded", False)
                for slab in sliced(p, optimizer.block(p, group)):
                    found.append(Piece(p, group, slab, folded))
    return found


def buckets(found: list[Piece]) -> list[list[Piece]]:
    """The pieces in their order, together while they are of one type and device and fit."""
    result: list[list[Piece]] = []
    room = 0
    for piece in found:
        dtype = precise(piece.p)
        needed = 2 * piece.count() * dtype.itemsize
        last = result[-1][-1].p if result else piece.p
        if not result or needed > room or (precise(last), last.device) != (dtype, piece.p.device):
            result.append([])
            room = BUCKET
        result[-1].append(piece)
        room -= needed
    return result


def _share(optimizer: AdamA, piece: Piece) -> list[Tensor]:
    """What this rank adds to the sums: 1 or 0 for `folded`, m and v, as vectors."""
    p, group, slab, folded = piece
    parts = [torch.full((1,), float(folded), dtype=precise(p), device=p.device)]
    state = optimizer.state[p] if p in optimizer.state else {}
    for name, beta, times in zip(MOMENTS, group["betas"], (1, optimizer.ranks)):
        if not state:
            parts.append(torch.zeros(piece.count(), dtype=precise(p), device=p.device))
            continue
        part = read(state, name, p, slab, optimizer.formats(p, group)).reshape(-1).to(precise(p))
        parts.append(part if folded else part * (times * beta))  # a gradient of zeros
    return parts


def _sum(optimizer: AdamA, values: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        ops, name = torch.ops._c10d_functional, optimizer.process_group.group_name
        return ops.wait_tensor(ops.all_reduce(values, "sum", name))
    torch.distributed.all_reduce(values, group=optimizer.process_group)
    return values


def _take(optimizer: AdamA, piece: Piece, sums: Tensor) -> None:
    """Put the sums over the ranks into the state."""
    p, group, slab, folded = piece
    if not folded and not sums[0] > 0:
        return
    formats, state = optimizer.formats(p, group), optimizer.state[p]
    if not state:
        state.update(compressed(optimizer.first_state(p, group), formats))
    if "folded" not in state:
        state["step"].add_(1)
        state["folded"] = True
    for name, values, ranks in zip(MOMENTS, sums[1:].chunk(2), (optimizer.ranks, optimizer.ranks**2)):
        part = read(state, name, p, slab, formats)
        part.copy_((values / ranks).view(part.shape))
        write(state, name, part, p, slab, formats)
