"""Have each rank of a tensor-parallel group keep a part of what all of them hold, as `StepGraph.plan` says:
P_a of ZeRO, and with the part in host memory P_a+cpu.

1. Of a value of the plan this rank's part is copied right behind the last operator of forward that touches
   it. Right before the first of backward that does, what runs again there included, all ranks gather it.
2. All of backward reads what was gathered, through views of it that are taken again.
3. All ranks make the same collectives in the same order: they have the same graph and the same plan.

Before:  a = add(x, wait(all_reduce(y))); ...                 | backward: mm(dy, a)
After:   a = add(x, wait(all_reduce(y))); p = part(a, 0, 2)   | backward: a' = wait(all_gather(p)); mm(dy, a')

Memory: from forward to backward one of `ranks` parts. Communication: a gather of the value in backward.
Numbers: bitwise, as only values are parted that are the same bits on every rank (`replicated`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import fx

from memopt_compile.collectives import arrived
from memopt_compile.partition import PART, RANKS, RANKS_HOST, gathered
from memopt_compile.planning.recomputing import last_of_forward, parts, recompute
from memopt_compile.step_graph import StepGraph
from memopt_compile.step_pass import StepPass
from memopt_compile.transfers import fetched, sent_to_host


@dataclass(frozen=True)
class PartitionActivations(StepPass):
    name: ClassVar[str] = "partition_activations"

    def requires(self, step: StepGraph) -> str | None:
        if step.plan is None or not any(form in (RANKS, RANKS_HOST) for _, form in step.plan.packed):
            return "no activation is to be kept in parts"
        return None

    def run(self, step: StepGraph, costs: Any = None) -> None:
        named, group = {n.name: n for n in step.computing()}, step.parallel
        last = last_of_forward(step)
        behind: dict[fx.Node, fx.Node] = {}  # what has been put behind an operator, the last of it
        whole: dict[fx.Node, Callable[[], fx.Node]] = {}
        for name, form in step.plan.packed:
            if form not in (RANKS, RANKS_HOST):
                continue
            place, value = last[named[name]], arrived(named[name])
            with step.graph.inserting_after(behind.get(place, place)):
                mine = step.call(value, PART, value, group.rank, group.ranks)
            behind[place] = sent_to_host(step, mine, mine) if form == RANKS_HOST else mine
            whole[value] = partial(_whole, step, value, mine, behind[place])
        recompute(step, parts(step, whole), source=whole)


def _whole(step: StepGraph, value: fx.Node, mine: fx.Node, kept: fx.Node) -> fx.Node:
    """The value again, made where the graph inserts now. `mine` is kept as it is, or on the host."""
    return gathered(step, value, mine if kept is mine else fetched(step, mine, kept), step.parallel)
