"""Parameters in low precision that are shared by ranks: this rank's rows of them, and how they are gathered.

The local tensor of the DTensor is a `LowPrecisionTensor` of this rank's rows. Gathering it gathers its
parts, codes and scales, and what has been waited for is decoded:

    rows' parts → padded to whole groups → all_gather of each part → wait → dequantize

1. Groups are of a rank's rows, counted from its first. Where the rows of a rank are whole groups they are the
   groups of one process, and so are the codes. Elsewhere a rank has as many groups as its elements need,
   of one size, which is at most the group size that was asked for.
2. The place by which an element is rounded is that in the whole parameter: ranks draw other numbers for other
   elements, and those of one process. Replicas of an element draw the same.
3. `draws` counts the writes of all ranks alike. It stays on its rank.
4. `state_dict()` has the values in float32, as DTensors: saved and loaded they fit any groups, and where these
   are the same, they have the same codes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from ..collectives import WAIT
from ..compat import subclass
from ..quantization.formats import Linear
from ..quantization.linear import TOGETHER
from ..quantization.operators import dequantize
from ..quantization.parameters import LowPrecisionTensor, encoded, register
from .storage import Kept, window


def rows_of(p: LowPrecisionTensor, rows: Tensor, start: int, mesh: Any, draws: Tensor) -> LowPrecisionTensor:
    """`rows`, those from row `start` of the decoded `p`, in the format of `p`, and with `draws` as the first
    rank has them."""
    draws = distribute_tensor(draws, mesh, [Replicate()]).to_local()
    form = grouped(p.form, _most(p, mesh))._replace(first=start * math.prod(p.shape[1:]))
    return encoded(rows, form, draws)


def windows(rows: LowPrecisionTensor, p: Tensor, mesh: Any) -> tuple[LowPrecisionTensor, list[Kept]]:
    """This rank's `rows` of `p` in the memory of the whole, which has a section for each rank."""
    *parts, draws = rows.parts
    sizes = rows.form.part_sizes(_section(_most(p, mesh), rows.form))
    kept = [window(part, mesh.get_local_rank() * size, size, mesh.size() * size)
            for part, size in zip(parts, sizes)]
    return rows.like_this([*(each.rows for each in kept), draws]), kept


def _most(p: Tensor, mesh: Any) -> int:
    """The elements of `p` that a rank has which has no fewer than another."""
    return -(-p.shape[0] // mesh.size()) * math.prod(p.shape[1:]) if p.dim() else 1


def grouped(form: Linear, count: int) -> Linear:
    """`form` with groups of one size for the `count` elements of a rank (rule 1)."""
    if count % form.block == 0:
        return form
    groups = math.ceil(count / form.block)
    return form._replace(block=math.ceil(count / groups / TOGETHER) * TOGETHER)


def saved(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A hook of `state_dict()`, which gives values: other ranks may have other groups."""
    for name, p in module._parameters.items():
        if isinstance(p, DTensor) and isinstance(p.to_local(), LowPrecisionTensor) and prefix + name in state:
            value = p.detach().to_local().to(torch.float32).dequantize()
            state[prefix + name] = DTensor.from_local(value, p.device_mesh, p.placements, run_check=False,
                                                      shape=p.shape, stride=p.stride())


def _pad(func: Any, self: LowPrecisionTensor, pad: Sequence[int], value: Any = None) -> Tensor:
    """Rows of zeros behind the last one, on a rank that has fewer than others."""
    if any(pad[:-1]) or len(pad) != 2 * self.dim() or value:
        return func(self.dequantize(), pad, value)
    size = (self.shape[0] + pad[-1], *self.shape[1:])
    return self.like_this([*_resized(self.parts[:-1], self.form, math.prod(size)), self.parts[-1]], size=size)


class OnItsWay(LowPrecisionTensor):
    """The rows of all ranks while they are gathered, in as many sections of whole groups: to whatever reads
    it, they are what has been waited for and decoded."""

    ranks: int

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = subclass.on_tensors(cls, _landed, (args, kwargs or {}))
        return args[0] if func is WAIT else func(*args, **kwargs)


def _gather(func: Any, self: LowPrecisionTensor, ranks: int, group: Any) -> OnItsWay:
    parts = _resized(self.parts[:-1], self.form, _section(self.numel(), self.form))
    made = OnItsWay([*(func(part, ranks, group) for part in parts), self.parts[-1]], self.form,
                    (ranks * self.shape[0], *self.shape[1:]), self.dtype)
    made.ranks = ranks
    return made


def _landed(t: OnItsWay) -> Tensor:
    form, here = t.form, t.numel() // t.ranks
    each = _section(here, form)
    size = [t.ranks, each] if each > here else list(t.shape)
    value = dequantize([WAIT(part) for part in t.parts[:-1]], form.map, form.bits, form.block, size, t.dtype)
    return value[:, :here].reshape(t.shape) if each > here else value


def _section(count: int, form: Linear) -> int:
    """`count` elements, and those that are missing to whole groups."""
    return math.ceil(count / form.block) * form.block


def _resized(parts: Sequence[Tensor], form: Linear, count: int) -> list[Tensor]:
    """The parts of as many elements, those that are missing zeros."""
    return [F.pad(part, (0, size - part.numel())) if size > part.numel() else part
            for part, size in zip(parts, form.part_sizes(count))]


register(torch.ops.aten.constant_pad_nd, _pad)
register(torch.ops._c10d_functional.all_gather_into_tensor, _gather)
