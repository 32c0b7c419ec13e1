"""Put each update where its gradient is complete, with what it communicates (ZeRO).

Collectives keep the order of the trace, in which those of all updates stand behind the whole backward: sums
over ranks in an update (a norm, factored moments), and the gathers of new parameters that follow it. No
other pass may move them, and gradients would live until then.

1. Each node of the update runs as soon as it can: collectives in it are bound to no order but that of
   what they need. What needs nothing of forward and backward waits for its first reader.
2. The new order follows from the trace alone, not from bytes, which differ between ranks.

Before:  g = wait(reduce_scatter(..)); h = wait(reduce_scatter(..)) | s = wait(all_reduce(g)); p := p - s; ..
After:   g = wait(reduce_scatter(..)); s = wait(all_reduce(g)); p := p - s; h = wait(reduce_scatter(..)); ..

Memory: this rank's rows of a gradient die behind it. Numerics: bitwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from memopt_compile.ordering import predecessors
from memopt_compile.step_graph import Phase, StepGraph, is_collective
from memopt_compile.step_pass import StepPass


@dataclass(frozen=True)
class UpdateEarly(StepPass):
    name: ClassVar[str] = "update_early"

    def requires(self, step: StepGraph) -> str | None:
        communicates = any(is_collective(n) and step.phase(n) is Phase.UPDATE for n in step.computing())
        return None if communicates or step.windows else "no update communicates"

    def run(self, step: StepGraph, costs: Any = None) -> None:
        before = predecessors(step, free=(Phase.UPDATE,))
        order = list(before)
        place = {node: i for i, node in enumerate(order)}
        ready: dict[Any, int] = {}  # the last node of forward and backward that must have run
        after: dict[Any, int] = {}  # of the update, by what needs it
        for node in order:
            update = step.phase(node) is Phase.UPDATE
            ready[node] = max((ready[b] for b in before[node]), default=-1) if update else place[node]
        for node in reversed(order):
            if ready[node] < 0:
                ready[node] = after.get(node, -1)
            for b in before[node]:
                after[b] = min(after.get(b, ready[node]), ready[node])
        step.reorder(sorted(order, key=lambda n: (ready[n], step.phase(n) is Phase.UPDATE, place[n])))
