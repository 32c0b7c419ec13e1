"""Do what `torch.utils.checkpoint` marks in the user's model: compute a region again in backward.

1. What a region computes runs again where backward needs it, as the marks of its policy say
   (a plain checkpoint marks everything).
2. What the rest of forward reads of a region is its output and is kept, as in eager.
3. What cannot run again, random numbers above all, is kept: the numbers of a dropout are those that
   it drew. (`replay_dropout` leaves only its mask to be kept.) What writes runs once too: batch
   normalization counts a batch once in its statistics, as by `torch.compile`, where eager counts
   those of a region twice.

Before:  [a = gelu(h)]; y = mm(a, W)   | backward: mm(dy, a); gelu'(dy, h)
After:   [a = gelu(h)]; y = mm(a, W)   | backward: a' = gelu(h); mm(dy, a'); gelu'(dy, h)

Memory: the region's values die in forward. Numbers: bit for bit.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from memopt_compile.planning.recomputing import checkpointed, parts, recompute
from memopt_compile.planning.rematerialization import problem
from memopt_compile.step_graph import Phase, StepGraph, aliased_args
from memopt_compile.step_pass import StepPass


@dataclass(frozen=True)
class HonourCheckpoints(StepPass):
    name: ClassVar[str] = "honour_checkpoints"

    def requires(self, step: StepGraph) -> str | None:
        return None if any(map(checkpointed, step.computing())) else "nothing is checkpointed"

    def run(self, step: StepGraph, costs: Any = None) -> None:
        able = {o.node for o in problem(step, lambda node: 0.0).operations if o.again}
        again = {n for n in able if checkpointed(n) and not is_output(step, n)}
        recompute(step, parts(step, again))


def is_output(step: StepGraph, node: fx.Node) -> bool:
    """Whether forward reads `node`, an item or a view of it outside its region (rule 2)."""
    found = [node]
    for each in found:  # which grows
        for user in each.users:
            if user.op == "output" or step.phase(user) is not Phase.FORWARD:
                continue
            if user.meta.get("ac_graph_id") != node.meta.get("ac_graph_id"):
                return True
            if user.target is operator.getitem or each in aliased_args(user):
                found.append(user)
    return False
