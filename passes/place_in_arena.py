"""Give gathered parameters, and gradients on their way, planned places in one buffer (ZeRO's M_D and C_B).

Such tensors are large and come and go between activations of other sizes and lifetimes: an allocator that
serves them as they come is left with gaps that fit neither. Here they are tenants of an arena, an input of the
step that is kept between steps, and nothing is allocated for them.

1. Tenants are the results of gathers, alone or in a bucket, and what is given to scatters, if the operator that
   makes it has a form that writes where it is told to. With `products_only` that is a product of
   matrices: what a compiler fuses with others stays with them. No result of the step is a tenant, and nothing
   whose size is not known. Of a bucket all are tenants or none.
2. A tenant has its bytes from the operator that first writes it to the last that touches it in the order
   that the step now has, through any view, and a collective touches its operands until it has been
   waited for. So what comes into these bytes next is written behind the last read.
3. The arena is there at the peak too, whoever lives in it then. It is the largest found that does not raise the
   predicted peak by more than the share `rise`; what finds no place in it has memory of its own.
4. Places are those of `arena.place`. The step is not reordered behind this pass. Which collectives there are,
   and their order, stay as they are: ranks that have other rows may have other tenants.

Before:  w = wait(all_gather(p)); a = mm(x, w)
After:   w = wait(all_gather_out(p, out=window(arena, 0, [8, 8]))); a = mm(x, w)

Memory: the arena is there throughout, and no tenant beside it. So the peak rises by what the arena has more
than its tenants at that moment (rule 3).
Numerics: bitwise, the same kernels write elsewhere.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from memopt_compile.arena import ALIGNMENT, WINDOW, Tenant, place
from memopt_compile.collectives import GATHER, GATHER_INTO, GATHERS_INTO, is_collective
from memopt_compile.liveness import (
    Lifetimes,
    Workspace,
    lifetimes,
    live_bytes,
    no_workspace,
    resident_bytes,
    timeline,
)
from memopt_compile.lowering.writing import writing_form
from memopt_compile.step_graph import OPERATOR, Input, Role, StepGraph, storage_roots
from memopt_compile.step_pass import StepPass

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
GATHERS = c10d.all_gather_into_tensor_coalesced.default
SCATTERS = (c10d.reduce_scatter_tensor.default, c10d.reduce_scatter_tensor_coalesced.default)
STEP, TRIES = 0.9, 40  # sizes that are tried: from one to the next, and how many
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


@dataclass(frozen=True)
class PlaceInArena(StepPass):
    name: ClassVar[str] = "place_in_arena"
    products_only: bool = False
    rise: float = 0.02

    def requires(self, step: StepGraph) -> str | None:
        if any(n.target in (GATHER, GATHERS, *SCATTERS) for n in step.computing()):
            return None
        return "nothing is gathered or scattered"

    def run(self, step: StepGraph, costs: Any = None) -> None:
        owners, workspace = _owners(step, self.products_only), costs or no_workspace
        if not owners:
            return
        size, places = _largest(step, owners, timeline(step, workspace).peak_bytes * (1 + self.rise), workspace)
        if places:
            arena = _input(step, size, owners[0].meta["val"])
            windows = {node: _window(step, node, arena, offset) for node, offset in places.items()}
            for node, window in windows.items():
                if node.target is not operator.getitem:
                    _move(step, node, window)
            for bucket in dict.fromkeys(_launch(n) for n in windows if n.target is operator.getitem):
                _move_bucket(step, bucket, windows)


def _launch(owner: fx.Node) -> fx.Node:
    """What runs when `owner` is born: of an item the bucket."""
    return owner.args[0] if owner.target is operator.getitem else owner


def _owners(step: StepGraph, products_only: bool) -> list[fx.Node]:
    """Rule 1: what owns the tenants' bytes, in the order of the step."""
    life, roots = lifetimes(step.graph), storage_roots(step.graph)
    found = set(step.graph.find_nodes(op="call_function", target=GATHER))
    for bucket in step.graph.find_nodes(op="call_function", target=GATHERS):
        if all(u.target is operator.getitem and _placeable(u, life) for u in bucket.users) and (
                sorted(u.args[1] for u in bucket.users) == [*range(len(bucket.args[0]))]):
            found.update(bucket.users)
    for launch in (n for n in step.computing() if n.target in SCATTERS):
        for operand in launch.all_input_nodes:
            owner, *others = roots[operand]
            if not others and isinstance(owner.target, OPERATOR) and not is_collective(owner) and (
                    owner.target in PRODUCTS or not products_only) and writing_form(owner, owner):
                found.add(owner)
    owners = [n for n in step.computing() if n in found and _placeable(n, life)]
    return [n for n in owners if n.meta["val"].device == owners[0].meta["val"].device]


def _placeable(node: fx.Node, life: Lifetimes) -> bool:
    value = node.meta["val"]
    return (node not in life.kept and isinstance(value, Tensor) and value.device.type in ALIGNMENT
            and all(isinstance(size, int) for size in value.shape) and value.is_contiguous()
            and 0 < value.numel() * value.element_size() == value.untyped_storage().nbytes())


def _in_time(step: StepGraph, owners: Sequence[fx.Node], life: Lifetimes) -> list[Tenant]:
    """Rule 2."""
    last: dict[fx.Node, int] = {}
    place_of = {node: i for i, node in enumerate(step.computing())}
    for node, i in place_of.items():
        last.update(dict.fromkeys(life.touched[node], i))
    return [Tenant(n.name, life.size[n], place_of[_launch(n)], last[n]) for n in owners]


def _largest(step: StepGraph, owners: Sequence[fx.Node], most: float,
             workspace: Workspace) -> tuple[int, dict[fx.Node, int]]:
    """Rule 3: the bytes of the largest arena with which the peak is not above `most`, and places in it."""
    life, order, resident = lifetimes(step.graph), list(step.computing()), resident_bytes(step)
    tenants, points = _in_time(step, owners, life), live_bytes(order, life, workspace)
    at = points.index(max(points))
    # More than the rise and what lives there at the peak is too much.
    room = most - resident - points[at] + sum(t.nbytes for t in tenants if t.start <= at <= t.stop)
    for _ in range(TRIES):
        size, places = _within(int(room), owners, tenants)
        sizes, born = dict(life.size), dict(life.born)
        for node in places:
            born[_launch(node)] -= sizes.pop(node)
        beside = live_bytes(order, replace(life, size=sizes, born=born), workspace)
        if size + resident + max(beside) <= most:
            return size, places
        room *= STEP
    return 0, {}


def _within(capacity: int, owners: Sequence[fx.Node], tenants: Sequence[Tenant]) -> tuple[int, dict[fx.Node, int]]:
    """Places in `capacity` bytes at most, for all of a bucket or none."""
    alignment = ALIGNMENT[owners[0].meta["val"].device.type]
    inside = dict(zip(owners, tenants))
    while True:
        size, offsets = place(list(inside.values()), alignment, capacity)
        outside = {_launch(n) for n, offset in zip(inside, offsets) if offset is None}
        if not outside:
            return size, dict(zip(inside, offsets))
        inside = {n: tenant for n, tenant in inside.items() if _launch(n) not in outside}


def _input(step: StepGraph, nbytes: int, like: Tensor) -> fx.Node:
    """The arena, as the last input."""
    with step.graph.inserting_after(step.placeholders[-1]):
        arena = step.graph.placeholder("arena")
    arena.meta["val"] = like.new_empty(nbytes, dtype=torch.uint8)
    step.inputs = (*step.inputs, Input(arena.name, Role.ARENA, "arena", nbytes))
    return arena


def _window(step: StepGraph, node: fx.Node, arena: fx.Node, offset: int) -> fx.Node:
    value = node.meta["val"]
    with step.graph.inserting_before(_launch(node)):
        return step.call(node, WINDOW, arena, offset, list(value.shape), value.dtype)


def _move(step: StepGraph, node: fx.Node, window: fx.Node) -> None:
    """Have `node` write there."""
    with step.graph.inserting_before(node):
        if node.target is GATHER:
            new = step.call(node, GATHER_INTO, *node.args, out=window)
        else:
            form, args, kwargs = writing_form(node, window)
            new = step.call(node, form, *args, **kwargs)
    step.replace(node, new)


def _move_bucket(step: StepGraph, bucket: fx.Node, windows: dict[fx.Node, fx.Node]) -> None:
    items = sorted(bucket.users, key=lambda item: item.args[1])
    with step.graph.inserting_before(bucket):
        new = step.call(bucket, GATHERS_INTO, *bucket.args, out=[windows[item] for item in items])
    for i, item in enumerate(items):
        with step.graph.inserting_before(item):
            step.replace(item, step.call(item, operator.getitem, new, i))
    step.erase(bucket)
