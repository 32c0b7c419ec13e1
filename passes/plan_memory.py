"""Decide for every activation whether it is kept, computed again, compressed, put in host memory or kept in parts, so
that the step fits.

The decision is `planner`'s; it becomes `StepGraph.plan` and changes nothing by itself: the passes
`recompute`, `compress`, `partition_activations` and `offload` do what it says.

1. A step that fits gets no plan.
2. Of the plans that fit the fastest by `seconds` is taken, if it adds no more than `at_most`.
3. Where none fits, the plan with the smallest peak that was found is taken, unless another pass is
   to be tried first (`or_smallest`); whether it is enough once the other passes are done is for the
   budget's owner to judge.
4. A plan that is there and fits stays. Where none was found it is not looked for again, unless the step has changed.
5. Formats that lose nothing are always allowed, others as the user says.
6. Ranks that keep parts of activations all take the plan of the first of them: they have the same
   step, and make the same collectives.

Memory and numbers: as before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from memopt_compile.liveness import no_workspace, resident_bytes, timeline
from memopt_compile.memory_plan import Decision, MemoryPlan
from memopt_compile.planning import planner
from memopt_compile.planning.rematerialization import ALL_EXACT, PUT_AWAY, Means, Problem, problem
from memopt_compile.step_graph import Phase, StepGraph, describe, source_line
from memopt_compile.step_pass import StepPass
from memopt_compile.structure import groups
from memopt_compile.timing import cost_model


@dataclass(frozen=True)
class PlanMemory(StepPass):
    """`peak_bytes` is the budget, of the whole step; `device` whose speed decides, by its "roofline"
    or "measured" (`costs`); `means` what the user allows."""

    name: ClassVar[str] = "plan_memory"
    peak_bytes: int
    device: torch.device
    means: Means = ALL_EXACT
    or_smallest: bool = True
    costs: str = "roofline"
    at_most: float = math.inf

    def requires(self, step: StepGraph) -> str | None:
        if any(phase is Phase.BACKWARD for phase in step.phases.values()):
            return None
        return "the graph has no backward to plan for"

    def ensures(self, step: StepGraph) -> str | None:
        planned = {*step.plan.again, *(name for name, _ in step.plan.packed)} if step.plan else set()
        unknown = planned - {node.name for node in step.computing()}
        return f"the plan names {min(unknown)}, which is not there" if unknown else None

    def run(self, step: StepGraph, costs: Any = None) -> None:
        if step.plan is not None:  # rule 4
            return
        limit = self.peak_bytes - resident_bytes(step)
        if timeline(step, costs or no_workspace).transient_peak_bytes <= limit:  # rule 1
            return
        seconds = cost_model(self.costs, self.device)
        found = problem(step, seconds, costs, self.means)
        together = groups(found)
        asked = limit, self.at_most, self.means, tuple(step.computing())
        chosen = None if step.unplanned == asked else planner.cheapest(found, limit, together, self.at_most)  # rule 2
        step.unplanned = () if chosen else asked
        if chosen is None and self.or_smallest:  # rule 3
            chosen = planner.smallest(found, together)
        if chosen is not None:
            step.plan = memory_plan(found, limit, chosen, seconds.source)
        if self.means.parts:  # rule 6
            step.plan, *_ = step.parallel.exchange(step.plan)


def memory_plan(problem: Problem, limit: int, chosen: planner.Solution,
                costs: str = "roofline") -> MemoryPlan:
    """`chosen` in words: a decision for every activation that backward reads."""
    decisions = []
    for v, value in enumerate(problem.values):
        packed = chosen.packed.get(v)
        if packed or value.needed and value.first > value.last + 1:
            operation = problem.operations[value.operation]
            again = value.operation in chosen.again
            choice = (PUT_AWAY.get(packed.form, "compress") if packed
                      else "recompute" if again else "keep")
            decisions.append(Decision(
                value.node.name, describe(value.node), value.nbytes, choice,
                packed.seconds if packed else operation.seconds, source_line(value.node),
                packed.form if packed else "", packed.nbytes if packed else 0 if again else value.nbytes,
                packed.error if packed else 0.0))
    names = frozenset(name for o in chosen.again for name in problem.operations[o].names)
    formats = tuple((problem.values[v].node.name, p.form) for v, p in sorted(chosen.packed.items()))
    return MemoryPlan(limit, chosen.peak_bytes, chosen.seconds, chosen.gap, tuple(decisions), names,
                      formats, costs)
