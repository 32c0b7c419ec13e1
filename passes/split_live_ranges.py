"""Compute a value again at a late reader, where holding it until then makes the peak.

What fuses into its readers can be had twice: at the first of them, and again at a late one, so that
nothing holds it between (live-range splitting by rematerialization, as register allocators do). In a
residual network each sum reads the one before it, which backward needs again much later.

1. A value is split that is alive at the peak, read before it and after it and not then, the largest first;
   what is less than a 64th of the peak is not worth a kernel.
2. It, and what it is computed from, must fuse into a reader (`ordering.fuses`), back to values that are
   alive at the late reader anyway and that nothing has overwritten since.
3. A split that lowers the predicted peak stays, another is taken back. Then comes the next peak.
4. Splits that together save less than a 1024th of the peak are taken back: beside another peak as high, kernels
   run twice for nothing, and a value that is held again may take the place of what `reuse_buffers` would
   have written into.

Before:  r = relu(s); t = add(r, c); b = conv_backward(g, t); d = conv_backward(b, r)
After:   r = relu(s); t = add(r, c); b = conv_backward(g, t); r' = relu(s); d = conv_backward(b, r')

Memory: the peak falls, or nothing changes. Numbers: bit for bit the same operators on the same values.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from memopt_compile.liveness import Workspace, lifetimes, live_bytes, no_workspace
from memopt_compile.ordering import fuses
from memopt_compile.planning.recomputing import kept_by_the_user
from memopt_compile.step_graph import StepGraph, mutated_args, storage_roots
from memopt_compile.step_pass import StepPass

SMALL = 64
LITTLE = 1024


@dataclass(frozen=True)
class SplitLiveRanges(StepPass):
    """`most` bounds the splits of a step, each of which takes time linear in the graph."""

    name: ClassVar[str] = "split_live_ranges"
    most: int = 64

    def run(self, step: StepGraph, costs: Any = None) -> None:
        live = first = _Live(step, costs or no_workspace)
        made: list[Callable[[], None]] = []
        while len(made) < self.most:
            undo = next(filter(None, (_split(step, live, value) for value in live.across_the_peak())), None)
            if undo is None:
                break
            made.append(undo)
            live = _Live(step, live.workspace)
        if first.peak_bytes - live.peak_bytes < first.peak_bytes / LITTLE:  # rule 4
            for undo in reversed(made):
                undo()


def _split(step: StepGraph, live: _Live, value: fx.Node) -> Callable[[], None] | None:
    """Rule 3: how to take the split back, None where it was not worth it."""
    when = live.next_touch(value)
    again = live.to_compute_again(value, when)
    if again is None:
        return None
    copies: dict[fx.Node, fx.Node] = {}
    for node in again:
        with step.graph.inserting_before(live.order[when]):
            copies[node] = step.graph.node_copy(node, lambda n: copies.get(n, n))
        step.phases[copies[node]] = step.phase(live.order[when])
    moved = [(reader, read) for reader in live.order[when:] for read in reader.all_input_nodes
             if read in copies and value in live.roots[read]]
    for reader, read in moved:
        reader.replace_input_with(read, copies[read])

    def undo() -> None:
        for reader, read in moved:
            reader.replace_input_with(copies[read], read)
        for copy in reversed(copies.values()):
            step.erase(copy)

    if max(live_bytes(list(step.computing()), lifetimes(step.graph), live.workspace)) < live.peak_bytes:
        return undo
    undo()
    return None


class _Live:
    """What is alive when, in the present order; moments are places in it."""

    def __init__(self, step: StepGraph, workspace: Workspace) -> None:
        self.order, self.workspace = list(step.computing()), workspace
        self.roots, self.life = storage_roots(step.graph), lifetimes(step.graph)
        points = live_bytes(self.order, self.life, workspace)
        self.peak_bytes = max(points, default=0)
        self.peak = points.index(self.peak_bytes) if points else 0
        self.place = {node: i for i, node in enumerate(self.order)}
        self.touches: dict[fx.Node, list[int]] = {}
        self.writes: dict[fx.Node, list[int]] = {}
        for i, node in enumerate(self.order):
            for root in {r for a in (node, *node.all_input_nodes) for r in self.roots[a]}:
                self.touches.setdefault(root, []).append(i)
            for root in {r for a in mutated_args(node) for r in self.roots[a]}:
                self.writes.setdefault(root, []).append(i)

    def across_the_peak(self) -> list[fx.Node]:
        """Rule 1."""
        def crosses(root: fx.Node) -> bool:
            touches = self.touches[root]
            return touches[0] < self.peak < touches[-1] and self.peak not in touches

        sizes = self.life.size
        return sorted((root for root in self.touches if sizes.get(root, 0) > self.peak_bytes / SMALL
                       and root not in self.life.kept and crosses(root)), key=sizes.__getitem__, reverse=True)

    def next_touch(self, root: fx.Node) -> int:
        touches = self.touches[root]
        return touches[bisect_right(touches, self.peak)]

    def to_compute_again(self, value: fx.Node, when: int) -> list[fx.Node] | None:
        """What has to run at `when`, operands first, for those who read `value` or a view of it from then on;
        None if it cannot (rule 2)."""
        needed: dict[fx.Node, None] = {}

        def is_there(operand: fx.Node) -> bool:
            return all(root is not value and (root not in self.life.size or root in self.life.kept
                                              or self.touches[root][-1] >= when) for root in self.roots[operand])

        def is_as_it_was(operand: fx.Node) -> bool:
            made = self.place.get(operand, -1)
            return not any(made < write < when for root in self.roots[operand] for write in self.writes.get(root, ()))

        def can_run(node: fx.Node) -> bool:
            if node not in needed:
                if not fuses(node) or kept_by_the_user(node) or not is_as_it_was(node):
                    return False
                if not all(is_as_it_was(a) if is_there(a) else can_run(a) for a in node.all_input_nodes):
                    return False
                needed[node] = None
            return True

        late = [read for reader in self.order[when:] for read in reader.all_input_nodes
                if value in self.roots[read] and self.place[read] < when]
        return list(needed) if all(map(can_run, late)) else None
