"""One buffer for what comes and goes between activations: gathered parameters, gradients on their way.

A tenant of the arena has bytes of its own from the first operator that writes it to the last one that
touches it; a collective touches what it is given until it has been waited for. Both ends belong to it: what
an operator reads and what it writes never share bytes, and the result of a gather lies apart from its operand.

Where each tenant lies is found before anything runs (offline dynamic storage allocation, which is NP-hard):

1. Tenants are placed one after another, each in the smallest gap that is free in all of its time, else
   behind what is there then.
2. Three orders are tried (the largest first, the largest bytes by time first, as they come), and the
   smallest buffer is taken. The earliest of the three wins a tie, so that a plan is always the same.
3. Every tenant begins at a multiple of `alignment` bytes.
4. A buffer may have a capacity. What finds no place in it stays outside, and the order is taken that
   leaves out the fewest bytes by time.

No buffer can be smaller than the most bytes that tenants need at once: that is the lower bound.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakIdKeyDictionary

from .collectives import operands

# What PyTorch's allocators align to: kernels choose their path, and so the order of a sum, by that.
ALIGNMENT = {"cpu": 64, "cuda": 512}


@dataclass(frozen=True)
class Tenant:
    """`nbytes` from moment `start` to moment `stop` of the schedule, both included; `offset` once placed."""

    name: str
    nbytes: int
    start: int
    stop: int
    offset: int = 0

    def meets(self, other: Tenant) -> bool:
        """Whether there is a moment that has both."""
        return self.start <= other.stop and other.start <= self.stop

    def overlaps(self, other: Tenant) -> bool:
        """Whether they have bytes in common."""
        return (self.offset < other.offset + other.nbytes and other.offset < self.offset + self.nbytes)


@dataclass(frozen=True)
class Arena:
    """`tenants` in the order of the schedule, in a buffer of `nbytes`. They need `lower_bound_bytes` at once:
    what the buffer has more is lost between them."""

    nbytes: int
    lower_bound_bytes: int
    tenants: tuple[Tenant, ...]

    @property
    def lost_bytes(self) -> int:
        return self.nbytes - self.lower_bound_bytes


def place(tenants: Sequence[Tenant], alignment: int,
          capacity: int | None = None) -> tuple[int, list[int | None]]:
    """The bytes of a buffer for `tenants`, and where each of them begins. With a `capacity` in bytes that is the
    most, and what finds no place in it has None."""
    met, count = _met(tenants), range(len(tenants))
    orders = (sorted(count, key=lambda i: (-tenants[i].nbytes, tenants[i].start)),
              sorted(count, key=lambda i: (-_weight(tenants[i]), tenants[i].start)),
              sorted(count, key=lambda i: tenants[i].start))
    found = [_placed(tenants, order, met, alignment, capacity) for order in orders]
    return min(found, key=lambda each: (sum(_weight(t) for t, at in zip(tenants, each[1]) if at is None), each[0]))


def _weight(tenant: Tenant) -> int:
    """Its bytes, once for each moment."""
    return tenant.nbytes * (1 + tenant.stop - tenant.start)


def _met(tenants: Sequence[Tenant]) -> list[list[int]]:
    """For each tenant, those that are there at some moment of its time."""
    order = sorted(range(len(tenants)), key=lambda i: tenants[i].start)
    starts = [tenants[i].start for i in order]
    met: list[list[int]] = [[] for _ in tenants]
    for k, i in enumerate(order):
        for j in order[k + 1:bisect_right(starts, tenants[i].stop)]:
            met[i].append(j)
            met[j].append(i)
    return met


def _placed(tenants: Sequence[Tenant], order: Iterable[int], met: list[list[int]],
            alignment: int, capacity: int | None = None) -> tuple[int, list[int | None]]:
    """Rules 1, 3 and 4, for one order."""
    offsets: dict[int, int] = {}
    for i in order:
        free, best = 0, None
        for begin, end in sorted((offsets[j], offsets[j] + tenants[j].nbytes) for j in met[i] if j in offsets):
            if begin - free >= tenants[i].nbytes and (best is None or begin - free < best[0]):
                best = begin - free, free
            free = max(free, -(-end // alignment) * alignment)
        place_of = free if best is None else best[1]
        if capacity is None or place_of + tenants[i].nbytes <= capacity:
            offsets[i] = place_of
    size = max((at + tenants[i].nbytes for i, at in offsets.items()), default=0)
    return size, [offsets.get(i) for i in range(len(tenants))]


def lower_bound_bytes(tenants: Iterable[Tenant]) -> int:
    """The most bytes that `tenants` need at one moment."""
    changes = sorted(change for t in tenants for change in ((t.start, 1, t.nbytes), (t.stop + 1, 0, -t.nbytes)))
    live = most = 0
    for *_, change in changes:
        live += change
        most = max(most, live)
    return most


# ------------------------------------------------------------------------ in a graph

_library = torch.library.Library("memopt", "FRAGMENT")
_library.define("window(Tensor(a) arena, int offset, int[] sizes, ScalarType dtype) -> Tensor(a)")


def _window(arena: Tensor, offset: int, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    return arena[offset:offset + math.prod(sizes) * dtype.itemsize].view(dtype).view(sizes)


def _window_by_itself(arena: Tensor, offset: int, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """With a storage of its own on the same bytes. torch finds what `wait_tensor` waits for by the storage: in a common
    one the first wait would wait for all that is on its way into the arena."""
    part = arena[offset:offset + math.prod(sizes) * dtype.itemsize]
    return torch.from_dlpack(part).view(dtype).view(sizes)


_library.impl("window", _window, "CompositeExplicitAutograd")  # of fake tensors too
_library.impl("window", _window_by_itself, "CPU")
_library.impl("window", _window_by_itself, "CUDA")
WINDOW = torch.ops.memopt.window.default  # of the arena: the bytes of one tenant

Roots = dict[fx.Node, frozenset[fx.Node]]


def arena_of(graph: fx.Graph, roots: Roots) -> Arena | None:
    """The arena that `graph` has, None without one. `roots` are its owners of storages, by node."""
    windows = graph.find_nodes(op="call_function", target=WINDOW)
    if not windows:
        return None
    first: dict[fx.Node, int] = {}
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(graph.nodes):
        for owner in {r for a in operands(node) for r in roots[a] if r.target is WINDOW}:
            first.setdefault(owner, i)
            last[owner] = i
    tenants = [Tenant(w.name, math.prod(w.args[2]) * w.args[3].itemsize, first[w], last[w], w.args[1])
               for w in windows if w in first]
    return Arena(windows[0].args[0].meta["val"].numel(), lower_bound_bytes(tenants),
                 tuple(sorted(tenants, key=lambda t: t.start)))


def fault(graph: fx.Graph, roots_of: Callable[[fx.Graph], Roots],
          writes: Callable[[fx.Node], list[fx.Node]]) -> tuple[str, str] | None:
    """The name of a tenant, and what is wrong with it: it shares bytes with another one while both are there,
    is read before it is written, does not fit, or is a result of the step."""
    if not graph.find_nodes(op="call_function", target=WINDOW):
        return None
    roots = roots_of(graph)
    arena = arena_of(graph, roots)
    nodes = list(graph.nodes)
    returned = {r.name for a in graph.output_node().all_input_nodes for r in roots[a]}
    there: list[Tenant] = []
    for tenant in arena.tenants:
        there = [t for t in there if t.stop >= tenant.start]
        for other in there:
            if other.overlaps(tenant):
                return tenant.name, f"lies where {other.name} still is"
        there.append(tenant)
        if not any(r.name == tenant.name for a in writes(nodes[tenant.start]) for r in roots[a]):
            return tenant.name, f"is read by {nodes[tenant.start].name} before anything has written it"
        if tenant.offset < 0 or tenant.offset + tenant.nbytes > arena.nbytes:
            return tenant.name, f"does not lie in the arena's {arena.nbytes} bytes"
        if tenant.name in returned:
            return tenant.name, "is a result of the step, and would be overwritten by the next one"
    return None


def buffer_of(parameter: Tensor) -> Buffer:
    """The one that all steps with this parameter have: they write to it, and so run one at a time."""
    return _buffers.setdefault(parameter, Buffer())


class Buffer:
    """The memory of an arena: allocated when it is first needed, and kept for all later steps.

    All steps of one model have it in turn, and it grows if one of them needs more.
    """

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def of(self, nbytes: int, device: Any) -> Tensor:
        if self.tensor is None or self.tensor.numel() < nbytes:
            self.tensor = None  # before the larger one is there
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self.tensor[:nbytes]


_buffers: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by the first sharded parameter of a step
