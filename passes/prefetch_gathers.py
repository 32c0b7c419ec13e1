"""Begin to gather a parameter while the layer before it computes (ZeRO 3, for a budget).

1. A gather of this rank's rows is launched earlier: right behind the wait for the gather before it, so
   that one at a time is on its way. The wait stays where it is.
2. It does not pass another collective. So all ranks make the same calls in the same order, however far
   each of them can go: a rank with fewer rows, or more memory, may go further.
3. No more than the peak of the step allows that is asked for, or that it has without this. If the earliest
   place is too early for that, one half as far is tried, and so on. What gloo copies is counted from
   launch to wait.
4. Nothing else moves but what makes the operand from the rows (views, padding).

Before:  w = wait(gather(p)); a = mm(x, w); b = gelu(a); v = wait(gather(q)); c = mm(b, v)
After:   w = wait(gather(p)); g = gather(q); a = mm(x, w); b = gelu(a); v = wait(g); c = mm(b, v)

Memory: one gathered parameter more for a while, never above the limit. Numerics: bitwise.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from memopt_compile.collectives import is_collective, waits_of
from memopt_compile.liveness import Workspace, lifetimes, live_bytes, no_workspace, resident_bytes
from memopt_compile.ordering import predecessors
from memopt_compile.step_graph import Phase, StepGraph
from memopt_compile.step_pass import StepPass

c10d = torch.ops._c10d_functional
GATHERS = (c10d.all_gather_into_tensor.default, c10d.all_gather_into_tensor_coalesced.default)


@dataclass(frozen=True)
class PrefetchGathers(StepPass):
    """`peak_bytes` is the budget of the whole step."""

    name: ClassVar[str] = "prefetch_gathers"
    peak_bytes: int

    def requires(self, step: StepGraph) -> str | None:
        return None if any(True for _ in _gathers(step)) else "no parameter is gathered where it is read"

    def run(self, step: StepGraph, costs: Any = None) -> None:
        life, workspace, before = lifetimes(step.graph), costs or no_workspace, predecessors(step)

        def peak(order: list[fx.Node]) -> int:
            points = live_bytes(order, life, workspace)
            return max(map(sum, zip(points, _on_its_way(order, workspace))), default=0)

        order = list(step.computing())
        limit = max(self.peak_bytes - resident_bytes(step), peak(order))
        for launch in _gathers(step):
            moved = [*_makers(launch), launch, *(u for u in launch.users if u.target is operator.getitem)]
            rest = [n for n in order if n not in moved]
            last = len([n for n in order[:order.index(launch)] if n not in moved])
            place = _earliest(rest, last, {b for n in moved for b in before[n]})
            while place < last:
                trial = [*rest[:place], *moved, *rest[place:]]
                if peak(trial) <= limit:  # rule 3
                    order = trial
                    break
                place = (place + last + 1) // 2
        step.reorder(order)


def _gathers(step: StepGraph) -> Iterator[fx.Node]:
    """Those of forward and backward, of rows as they are in the inputs."""
    for node in step.computing():
        if node.target in GATHERS and step.phase(node) is not Phase.UPDATE and _makers(node) is not None:
            yield node


def _makers(launch: fx.Node) -> list[fx.Node] | None:
    """The operators, operands first, that make what is gathered from inputs, each from one; None if others
    do, or read it too."""
    found: list[fx.Node] = []
    for node in launch.all_input_nodes:
        chain = []
        while node.op != "placeholder":
            if len(node.all_input_nodes) != 1 or len(node.users) != 1 or is_collective(node):
                return None
            chain.append(node)
            node = node.all_input_nodes[0]
        found += chain[::-1]
    return found


def _earliest(rest: list[fx.Node], last: int, needed: set[fx.Node]) -> int:
    """Rules 1 and 2: the first place in `rest` up to `last`."""
    ahead = {node: i for i, node in enumerate(rest[:last])}
    previous = next((n for n in reversed(ahead) if is_collective(n)), None)
    places = [ahead[n] + 1 for n in needed if n in ahead]
    if previous is not None:
        places.append(ahead[previous] + 1)
        if previous.target in GATHERS:  # a bucket has several waits: what is waited for first is there
            places.append(min((ahead[w] + 1 for w in waits_of(previous) if w in ahead), default=last))
    return max(places, default=0)


def _on_its_way(order: list[fx.Node], workspace: Workspace) -> list[int]:
    """For each moment, what a transport holds for collectives that are neither launched there nor waited for."""
    place, held = {node: i for i, node in enumerate(order)}, [0] * len(order)
    for launch in filter(is_collective, order):
        for i in range(place[launch] + 1, max((place[w] for w in waits_of(launch)), default=0)):
            held[i] += workspace(launch)
    return held
