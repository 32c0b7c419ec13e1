"""Give copies between host and device the time that other work takes.

1. A copy to the host is waited for later: behind as much other work as it takes by the cost model, or
   as fits. What is being sent lives until then.
2. A copy from the host begins earlier, ahead of as much work. What comes lives from then on.
3. No more than the peak of the step allows that is asked for, or that it has without this.
4. Nothing else moves.

Before:  a = gelu(h); t = sent(to_host(a), a); b = mm(..); c = mm(..)    | a' = arrived(from_host(t)); ..
After:   a = gelu(h); t = to_host(a); b = mm(..); sent(t, a); c = mm(..) | f = from_host(t); ..; arrived(f)

Memory: more for a while, never above the limit. Numbers: bitwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from memopt_compile.liveness import lifetimes, live_bytes, no_workspace, resident_bytes
from memopt_compile.ordering import predecessors
from memopt_compile.seconds import roofline
from memopt_compile.step_graph import StepGraph
from memopt_compile.step_pass import StepPass
from memopt_compile.transfers import ARRIVED, BEGINNINGS, SENT


@dataclass(frozen=True)
class OverlapTransfers(StepPass):
    """`peak_bytes` is the budget of the whole step; `device` whose speed decides."""

    name: ClassVar[str] = "overlap_transfers"
    peak_bytes: int
    device: torch.device

    def requires(self, step: StepGraph) -> str | None:
        if any(n.target in BEGINNINGS for n in step.computing()):
            return None
        return "nothing goes to the host"

    def run(self, step: StepGraph, costs: Any = None) -> None:
        order, before = list(step.computing()), predecessors(step)
        life, workspace = lifetimes(step.graph), costs or no_workspace
        limit = max(self.peak_bytes - resident_bytes(step), *live_bytes(order, life, workspace))
        seconds = roofline(self.device)
        for node in [n for n in order if n.target in (SENT, ARRIVED)]:
            begun = node.args[0]
            moved, step_by = (node, 1) if node.target is SENT else (begun, -1)
            for place in _places(order, moved, step_by, seconds, seconds(begun), before):
                trial = [n for n in order if n is not moved]
                trial.insert(place, moved)
                if max(live_bytes(trial, life, workspace)) <= limit:  # rule 3
                    order = trial
                    break
        step.reorder(order)


def _places(order: list[fx.Node], moved: fx.Node, step_by: int, seconds: Any, needed: float,
            before: dict[fx.Node, list[fx.Node]]) -> list[int]:
    """Places for `moved` further on (or back, if `step_by` is -1), the one that leaves `needed` seconds
    between first, then ones that leave half of that and so on; none past what has to stay on its side."""
    at, passed, found = order.index(moved), 0.0, [0.0]
    while passed < needed and 0 <= (next_ := at + step_by * len(found)) < len(order):
        other = order[next_]
        if moved in before[other] or other in before[moved]:
            break
        passed += seconds(other)
        found.append(passed)
    reached = [max(i for i, s in enumerate(found) if s <= passed / 2**k) for k in range(4)]
    return [at + step_by * i for i in dict.fromkeys(reached) if i]
