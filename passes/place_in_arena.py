"""Give gathered parameters, and gradients on their way, planned places in one buffer (ZeRO's M_D and C_B).

Such tensors are large and come and go between activations of other sizes and lifetimes: an allocator that
serves them as they come is left with gaps that fit neither. Here they are tenants of an arena, an input of the
step that is kept between steps, and nothing is allocated for them.

1. Parameters that are gathered in a bucket travel as one flat tensor: their rows are put side by side, and
   what has come is copied into the parameters, all of them behind the first wait. (A coalesced gather
   cannot be told where to write.)
2. Tenants are the results of gathers, what rule 1 copies, and what is given to scatters, if the operator that
   makes it has a form that writes where it is told to. With `products_only` that is a product of matrices:
   what a compiler fuses with others stays with them. No result of the step is a tenant, and nothing
   whose size is not known.
3. A tenant has its bytes from the operator that first writes it to the last that touches it in the order
   that the step now has, through any view, and a collective touches its operands until it has been
   waited for. So what comes into these bytes next is written behind the last read.
4. The arena is there at the peak too, whoever lives in it then. It is the largest that does not raise the
   predicted peak by more than the share `rise`; what finds no place in it has memory of its own. If the
   parameters of buckets find none, they travel as before.
5. Places are those of `arena.place`. The step is not reordered behind this pass.

Before:  w = wait(all_gather(p)); a = mm(x, w)
After:   w = wait(all_gather_out(p, out=window(arena, 0, [8, 8]))); a = mm(x, w)

Memory: the arena is there throughout, and no tenant beside it. So the peak rises by what the arena has more
than its tenants at that moment (rule 4); buckets of parameters are there twice while they are copied.
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
from memopt_compile.collectives import GATHER, GATHER_INTO, WAIT, is_collective
from memopt_compile.liveness import (
    Workspace,
    lifetimes,
    live_bytes,
    no_workspace,
    resident_bytes,
    timeline,
)
from memopt_compile.step_graph import OPERATOR, Input, Role, StepGraph, storage_roots
from memopt_compile.step_pass import StepPass
from memopt_compile.writing import writing_form

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
GATHERS = c10d.all_gather_into_tensor_coalesced.default
SCATTERS = (c10d.reduce_scatter_tensor.default, c10d.reduce_scatter_tensor_coalesced.default)
STEP = 0.9  # from one size that is tried to the next
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
        workspace = costs or no_workspace
        most = timeline(step, workspace).peak_bytes * (1 + self.rise)
        for flat in (True, False):
            trial = step.copy()
            copied = [made for launch in trial.graph.find_nodes(op="call_function", target=GATHERS) if flat
                      for made in _flattened(trial, launch)]
            size, places = _largest(trial, _owners(trial, copied, self.products_only), most, workspace, copied)
            if places and places.keys() >= {*copied}:
                arena = _input(trial, size, next(iter(places)).meta["val"])
                for node, offset in places.items():
                    _move(trial, node, arena, offset)
                vars(step).update(vars(trial))
                return


def _largest(step: StepGraph, owners: Sequence[fx.Node], most: float, workspace: Workspace,
             copied: Sequence[fx.Node]) -> tuple[int, dict[fx.Node, int]]:
    """Rule 4: the bytes of the largest arena with which the peak is not above `most`, and places in it."""
    life, order, tenants = lifetimes(step.graph), list(step.computing()), _in_time(step, owners)
    if not owners:
        return 0, {}
    first = {i for i, node in enumerate(owners) if node in copied}
    points = live_bytes(order, life, workspace)
    at = points.index(max(points))
    # More than what lives there at the peak, and the rise, is too much.
    room = most - resident_bytes(step) - points[at] + sum(t.nbytes for t in tenants if t.start <= at <= t.stop)
    while room >= 1:
        size, offsets = place(tenants, ALIGNMENT[owners[0].meta["val"].device.type], int(room), first)
        places = {node: offset for node, offset in zip(owners, offsets) if offset is not None}
        sizes, born = ({n: 0 if n in places else nbytes for n, nbytes in of.items()} for of in (life.size, life.born))
        beside = live_bytes(order, replace(life, size=sizes, born=born), workspace)
        if size + resident_bytes(step) + max(beside) <= most:
            return size, places
        room *= STEP
    return 0, {}


def _flattened(step: StepGraph, launch: fx.Node) -> list[fx.Node]:
    """Rule 1. What it copies: the rows side by side, and each parameter."""
    rows, ranks, group = launch.args
    items = [user for user in launch.users if user.target is operator.getitem]
    waits = {wait: item.args[1] for item in items for wait in item.users}
    sizes = [each.meta["val"].numel() for each in rows]
    if not all(isinstance(size, int) for size in sizes) or not waits:
        return []
    with step.graph.inserting_before(launch):
        flat = [step.call(launch, aten.view.default, each, [-1]) for each in rows]
        sent = step.call(launch, aten.cat.default, flat)
        gathered = step.call(launch, GATHER, sent, ranks, group)
    made, starts = [sent], [sum(sizes[:i]) for i in range(len(sizes))]
    with step.graph.inserting_before(min(waits)):  # the first in the order of the graph
        wait = step.call(min(waits), WAIT, gathered)
        of_ranks = step.call(wait, aten.view.default, wait, [ranks, sum(sizes)])
        for each, i in waits.items():
            part = step.call(each, aten.slice.Tensor, of_ranks, 1, starts[i], starts[i] + sizes[i])
            made.append(step.call(each, aten.clone.default, part, memory_format=torch.contiguous_format))
            whole = step.call(each, aten.view.default, made[-1], list(each.meta["val"].shape))
            each.replace_all_uses_with(whole)
    for dead in (*waits, *items, launch):
        step.erase(dead)
    return made


def _owners(step: StepGraph, copied: Sequence[fx.Node], products_only: bool) -> list[fx.Node]:
    """Rule 2: the operators that make the tenants, in the order of the step."""
    life, roots = lifetimes(step.graph), storage_roots(step.graph)
    found = {*copied, *step.graph.find_nodes(op="call_function", target=GATHER)}
    for launch in (n for n in step.computing() if n.target in SCATTERS):
        for operand in launch.all_input_nodes:
            owner, *others = roots[operand]
            if not others and isinstance(owner.target, OPERATOR) and not is_collective(owner) and (
                    owner.target in PRODUCTS or not products_only) and writing_form(owner, owner):
                found.add(owner)
    owners = [n for n in step.computing() if n in found and n not in life.kept and _placeable(n.meta["val"])]
    return [n for n in owners if n.meta["val"].device == owners[0].meta["val"].device]


def _placeable(value: Any) -> bool:
    return (isinstance(value, Tensor) and value.device.type in ALIGNMENT
            and all(isinstance(size, int) for size in value.shape) and value.is_contiguous()
            and 0 < value.numel() * value.element_size() == value.untyped_storage().nbytes())


def _in_time(step: StepGraph, owners: Sequence[fx.Node]) -> list[Tenant]:
    """Rule 3."""
    touched, last = lifetimes(step.graph).touched, {}
    place_of = {node: i for i, node in enumerate(step.computing())}
    for node, i in place_of.items():
        last.update(dict.fromkeys(touched[node], i))
    return [Tenant(n.name, n.meta["val"].untyped_storage().nbytes(), place_of[n], last[n]) for n in owners]


def _input(step: StepGraph, nbytes: int, like: Tensor) -> fx.Node:
    """The arena, as the last input."""
    with step.graph.inserting_after(step.placeholders[-1]):
        arena = step.graph.placeholder("arena")
    arena.meta["val"] = like.new_empty(nbytes, dtype=torch.uint8)
    step.inputs = (*step.inputs, Input(arena.name, Role.ARENA, "arena", nbytes))
    return arena


def _move(step: StepGraph, node: fx.Node, arena: fx.Node, offset: int) -> None:
    """Have `node` write into the arena."""
    value = node.meta["val"]
    with step.graph.inserting_before(node):
        window = step.call(node, WINDOW, arena, offset, list(value.shape), value.dtype)
        if node.target is GATHER:
            new = step.call(node, GATHER_INTO, *node.args, out=window)
        elif node.target is aten.clone.default:
            new = step.call(node, aten.copy_.default, window, node.args[0])
        else:
            form, args, kwargs = writing_form(node, window)
            new = step.call(node, form, *args, **kwargs)
    step.replace(node, new)
