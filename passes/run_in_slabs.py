"""Run elementwise operators on large tensors a slab at a time, so that what they hand on is never there whole.

The update of a large parameter makes values of its size that only its own next operator reads: AdamW takes the
root of v, adds ε, divides m by it. Each element goes its way alone. So the operators can run on some elements
one behind the other, and then on the next (`in_slabs`). For the eager lowering: Inductor fuses them.

1. A temporary is an array of at least `at_least` elements, on the CPU, that elementwise operators alone touch, and
   views that keep the order of its elements in memory. A finished gradient is none: it is what reports count.
2. With a temporary all who touch it go into a region; those that share one are one region.
3. What a region reads or writes beside is as large and lies in memory in the same order, or is one number.
4. If it writes to a storage then each of its operators uses all of that, from the first byte on: an element is
   written where it is read.
5. What depends on an operator of a region and is depended on by another is of the region too, if it could be by
   rule 3; else the temporary is none that would join them. What else stands between moves to the front, or behind.
6. What is read outside and has no storage yet is written into a new one.
7. ``copy_(m, m)`` takes a result's place. It copies nothing, and says that what reads it comes behind the region.
8. If the predicted peak is higher then (what a region reads is there until its end), all stays as it was.

Before:  root = sqrt(v); t = div_(root, n); t = add_(t, 1e-08); p = addcdiv_(p, m, t)
After:   in_slabs_([p], [v, m], [n], 't0 = sqrt(a1); div_(t0, n0); add_(t0, 1e-08); addcdiv_(a0, a2, t0)', 65536)

Memory: a temporary takes as much as a slab of it, whatever the parameter's size. Numerics: bitwise; a slab is a
multiple of what kernels do at once. (On several threads a kernel cuts its work where no vector ends, slabs or
not: there the last bit of an exponential, say, is one or the other.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from memopt_compile.in_slabs import IN_SLABS_, slab_length
from memopt_compile.liveness import no_workspace, timeline
from memopt_compile.ordering import is_random, predecessors
from memopt_compile.rowwise import ELEMENTWISE
from memopt_compile.step_graph import (
    OPERATOR,
    Phase,
    StepGraph,
    aliased_args,
    mutated_args,
    nbytes,
    storage_roots,
)
from memopt_compile.step_pass import StepPass

aten = torch.ops.aten

ALSO = ELEMENTWISE | {"aten::copy_", "aten::masked_fill_"}  # elementwise, and not tagged so
PLAIN = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


@dataclass(frozen=True)
class RunInSlabs(StepPass):
    """`length` is of a slab, in elements; by default what the number of threads asks for. `of_updates`: no temporary but
    those of updates, so that passes behind it still see what forward and backward are made of. `unplanned`: nothing where
    a plan is made, which names operators."""

    name: ClassVar[str] = "run_in_slabs"
    at_least: int = 1 << 20
    length: int | None = None
    of_updates: bool = False
    unplanned: bool = False

    def requires(self, step: StepGraph) -> str | None:
        return "the step has its plan" if self.unplanned and step.plan is not None else None

    def run(self, step: StepGraph, costs: Any = None) -> None:
        length = self.length or slab_length()
        places = _Places(step, max(self.at_least, 2 * length), self.of_updates)
        regions = places.regions()
        if not regions:
            return
        before, workspace = step.copy(), costs or no_workspace
        peak = timeline(step, workspace).peak_bytes
        step.reorder(places.order)
        for region in regions:
            places.rewrite(region, length)
        if timeline(step, workspace).peak_bytes > peak:  # rule 8
            step.module, step.phases, step.gradients = before.module, before.phases, before.gradients


class _Places:
    """Who touches which storage, and what of it is a temporary."""

    def __init__(self, step: StepGraph, at_least: int, of_updates: bool) -> None:
        self.step, self.at_least = step, at_least
        self.order = list(step.computing())
        self.roots = storage_roots(step.graph)
        self.touching: dict[fx.Node, list[fx.Node]] = {}
        for node in step.graph.nodes:
            for root in {r for a in (node, *node.all_input_nodes) for r in self.roots[a]}:
                self.touching.setdefault(root, []).append(node)
        self.fit = fit = {node for node in self.order if self._is_elementwise(node) or self._is_view(node)}
        self.temporaries = {root for root, nodes in self.touching.items() if root in fit and self.roots[root] == {root}
                            and fit.issuperset(nodes) and step.gradients.keys().isdisjoint(nodes)
                            and (not of_updates or step.phase(root) is Phase.UPDATE)}

    def _is_elementwise(self, node: fx.Node) -> bool:
        """Rule 3."""
        value, target = node.meta.get("val"), node.target
        if not (isinstance(target, OPERATOR) and self._is_large(value) and _is_plain(node)) or is_random(node):
            return False
        if target is aten.arange.default:
            return not value.is_floating_point()
        if torch.Tag.pointwise not in target.tags and target._schema.name not in ALSO:
            return False
        return all(isinstance(given := a.meta["val"], Tensor) and len(self.roots[a]) == 1 and (
                given.dim() == 0 or _repeats_one(given, value.shape)
                or self._is_large(given) and given.shape == value.shape and _strides(given) == _strides(value))
            for a in node.all_input_nodes) and all(self._is_large(a.meta["val"]) for a in mutated_args(node))

    def _is_view(self, node: fx.Node) -> bool:
        """Whether `node` shows all elements of its operand, in the order in which they lie there."""
        if mutated_args(node) or len(aliased_args(node)) != 1 or len(node.all_input_nodes) != 1:
            return False
        value, given = node.meta.get("val"), node.all_input_nodes[0].meta["val"]
        return self._is_large(value) and self._is_large(given) and value.numel() == given.numel()

    def _is_large(self, value: Any) -> bool:
        """Whether it is a large array without gaps."""
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.device.type != "cpu":
            return False
        if any(type(size) is not int for size in (*value.shape, *value.stride(), value.storage_offset())):
            return False
        if value.numel() < self.at_least or value.is_complex() or value.is_neg():
            return False
        steps = sorted((stride, size) for size, stride in zip(value.shape, value.stride()) if size > 1)
        expected = 1
        for stride, size in steps:
            if stride != expected:
                return False
            expected *= size
        return True

    def regions(self) -> list[list[fx.Node]]:
        """Rules 2, 4 and 5. Each is in one piece in `order` then."""
        before = predecessors(self.step) if self.temporaries else {}
        place = {node: i for i, node in enumerate(self.order)}
        of: dict[fx.Node, set[fx.Node]] = {}

        def window(region: set[fx.Node]) -> slice:
            low, high = (end(map(place.__getitem__, region)) for end in (min, max))
            return slice(low, high + 1)

        for root in [root for root in self.touching if root in self.temporaries]:
            region, between = set[fx.Node](), set(self.touching[root])
            while between and self.fit.issuperset(between):
                region = region.union(between, *{id(of[n]): of[n] for n in between if n in of}.values())
                between = _between(self.order[window(region)], before, region)
            if between:
                self.temporaries.discard(root)
            else:
                of.update(dict.fromkeys(region, region))
        found: list[list[fx.Node]] = []
        block: dict[fx.Node, int] = {}
        for region in {id(region): region for region in of.values()}.values():
            there = window(region)
            gathered = _gather(self.order[there], before, region, block) if self._uses_all(region) else None
            if gathered is not None:
                block.update(dict.fromkeys(region, len(found)))
                found.append([node for node in gathered if node in region])
                place.update((node, there.start + i) for i, node in enumerate(gathered))
                self.order[there] = gathered
        return found

    def _uses_all(self, region: set[fx.Node]) -> bool:
        """Rule 4; and whether there is anything that it reads and writes."""
        touched = {a for n in region for a in (n, *n.all_input_nodes)}
        written = self._written(region)
        values = [n.meta["val"] for n in touched if self.roots[n] & written]
        return bool(values) and touched > region and all(
            v.storage_offset() == 0 and v.numel() * v.element_size() == nbytes(v) for v in values)

    def _written(self, region: Iterable[fx.Node]) -> set[fx.Node]:
        """Owners of what is there behind the region and what it has made or changed."""
        return {root for n in region for a in (n, *mutated_args(n)) if a is not n or self.roots[n] == {n}
                for root in self.roots[a]} - self.temporaries

    def rewrite(self, region: list[fx.Node], length: int) -> None:
        step, inside, owners = self.step, set(region), self._written(region)
        given = dict.fromkeys(a for n in region for a in n.all_input_nodes if a not in inside)
        numbers = [a for a in given if a.meta["val"].dim() == 0]
        made = {}
        for node in region:
            if node in owners:  # rule 6
                value = node.meta["val"]
                with step.graph.inserting_before(region[0]):
                    made[node] = step.call(node, aten.new_empty_strided.default, next(iter(given)), list(value.shape),
                                           list(value.stride()), dtype=value.dtype)
                self.roots[made[node]] = self.roots[node]
        written = [*(a for a in given if self.roots[a] & owners), *made.values()]
        read = [a for a in given if a not in numbers and a not in written]
        names = {a: f"a{i}" for i, a in enumerate((*written, *read))} | {a: f"n{i}" for i, a in enumerate(numbers)}
        program = _program(region, names | {node: names[place] for node, place in made.items()}, set(made))
        with step.graph.inserting_after(region[-1]):
            call = step.call(region[-1], IN_SLABS_, written, read, numbers, program, length)
        shown = dict[fx.Node, fx.Node]()
        behind = call.next

        def show(node: fx.Node) -> fx.Node:
            """What has the value of `node` behind the region (rule 7)."""
            place = made.get(node) or next(iter(mutated_args(node)), None) if node in inside else None
            if place is not None:
                return show(place)
            if node not in shown:
                with step.graph.inserting_before(behind):
                    if node in inside:  # a view
                        shown[node] = step.call(node, node.target, show(node.args[0]), *node.args[1:], **node.kwargs)
                    elif node in written:
                        shown[node] = step.call(call, aten.copy_.default, node, node)
                    else:
                        shown[node] = node
                self.roots[shown[node]] = self.roots[node]  # another region may read it
            return shown[node]

        for node in region:
            for user in [user for user in node.users if user not in inside and user is not call]:
                user.replace_input_with(node, show(node))
                if node in step.gradients:
                    step.gradients[show(node)] = step.gradients[node]
        for node in reversed(region):
            step.erase(node)


def _between(window: list[fx.Node], before: Mapping[fx.Node, list[fx.Node]], region: set[fx.Node]) -> set[fx.Node]:
    """What in `window` depends on `region` and is depended on by it."""
    behind, ahead = set[fx.Node](), set[fx.Node]()
    for node in window:
        if any(b in region or b in behind for b in before[node]):
            behind.add(node)
    for node in reversed(window):
        if node in region or node in ahead:
            ahead.update(before[node])
    return behind & ahead - region


def _gather(window: list[fx.Node], before: Mapping[fx.Node, list[fx.Node]], region: set[fx.Node],
            block: Mapping[fx.Node, int]) -> list[fx.Node] | None:
    """`window` with `region`, and still each `block`, in one piece; None if a block is in the way (rule 5)."""
    ahead, members = list[fx.Node](), list[fx.Node]()
    behind: dict[fx.Node, None] = {}
    for _, nodes in groupby(window, key=lambda n: block.get(n, n)):
        unit = list(nodes)
        needs = {b for n in unit for b in before[n]}
        late = not needs.isdisjoint(behind)
        if unit[0] in region:
            if late:
                return None
            members += unit
        elif late or not needs.isdisjoint(region):
            behind.update(dict.fromkeys(unit))
        else:
            ahead += unit
    return [*ahead, *members, *behind]


def _program(region: list[fx.Node], names: dict[fx.Node, str], made: set[fx.Node]) -> str:
    """What `region` does to a slab. Each temporary goes behind its last reader."""
    lines: list[tuple[str, set[str]]] = []
    for node in region:
        into = mutated_args(node)
        reads = {names[a] for a in node.all_input_nodes}
        if not into and aliased_args(node) and node.target is not aten.view.dtype:
            names[node] = names[aliased_args(node)[0]]
            continue
        if node.target is aten.arange.default:
            call = f"aten.arange.start(first, stop{_named(node, names)})"
        else:
            args = ", ".join(_text(a, names) for a in node.args)
            call = f"{node.target}({args}{_named(node, names)})"
        if node in made:
            call = f"{names[node]}.copy_({call})"
        elif into:
            names[node] = names[into[0]]
        else:
            names[node] = f"t{len(lines)}"
            call = f"{names[node]} = {call}"
            reads.add(names[node])
        lines.append((call, reads))
    last = {name: i for i, (_, used) in enumerate(lines) for name in used if name.startswith("t")}
    return "; ".join(each for i, (call, used) in enumerate(lines)
                     for each in (call, *(f"del {name}" for name in sorted(used) if last.get(name) == i)))


def _named(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """Arguments by keyword. A slab has one dimension, and so no memory format."""
    return "".join(f", {key}={_text(value, names)}" for key, value in sorted(node.kwargs.items())
                   if key not in ("memory_format", "pin_memory"))


def _text(value: Any, names: Mapping[fx.Node, str]) -> str:
    return names[value] if isinstance(value, fx.Node) else repr(value)


def _is_plain(node: fx.Node) -> bool:
    """Whether all arguments are tensors and what a program can say."""
    return all(isinstance(a, (fx.Node, *PLAIN)) for a in (*node.args, *node.kwargs.values()))


def _strides(value: Tensor) -> tuple[int, ...]:
    """Those that matter."""
    return tuple(stride for size, stride in zip(value.shape, value.stride()) if size > 1)


def _repeats_one(value: Tensor, shape: torch.Size) -> bool:
    return value.shape == shape and not any(value.stride())
