"""Run operators again in backward, as `StepGraph.plan` says.

1. An operator of the plan runs again right before the first reader of one of its results in
   backward, behind those of its operands that run again too; every backward reads the copy.
2. Items and views of what it makes are taken again with it, and what Inductor makes one loop with it stands right before it.
3. The plan has only operators whose operands are what they were: no random numbers but those that
   follow from a seed, nothing that is overwritten before, no collectives.

Before:  h = mm(x, W); a = gelu(h); ...   | backward: mm(dy, a); gelu'(dy, h)
After:   h = mm(x, W); a = gelu(h); ...   | backward: h' = mm(x, W); a' = gelu(h'); ...

Memory: the values die in forward. Numbers: bit for bit the same operators on the same values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from memopt_compile.liveness import no_workspace, seen_by
from memopt_compile.planning.recomputing import loops, parts, recompute
from memopt_compile.step_graph import StepGraph
from memopt_compile.step_pass import StepPass


@dataclass(frozen=True)
class Recompute(StepPass):
    name: ClassVar[str] = "recompute"

    def requires(self, step: StepGraph) -> str | None:
        if step.plan is None or not step.plan.again:
            return "nothing is to run again"
        return None

    def run(self, step: StepGraph, costs: Any = None) -> None:
        again = {n for n in step.computing() if n.name in step.plan.again}
        recompute(step, parts(step, again), loops=loops(step, seen_by(costs or no_workspace, step)[0]))  # rule 2

    def ensures(self, step: StepGraph) -> str | None:
        names = {n.name for n in step.computing()}
        lost = step.plan.again - names
        return f"{', '.join(sorted(lost)[:5])} of the plan are gone" if lost else None
