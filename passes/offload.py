"""Let activations wait for backward in host memory, as `StepGraph.plan` says.

1. A value of the plan is sent to the host right behind the last operator of forward that touches it,
   and comes back right before the first of backward that does, what runs again there included.
2. All of backward reads what came back, through views of it that are taken again.

Before:  a = gelu(h); y = mm(a, W); ...                                  | backward: mm(dy, a)
After:   a = gelu(h); y = mm(a, W); t = sent(to_host(a), a); ...         | backward:
         a' = arrived(from_host(t)); mm(dy, a')

Memory: of the device nothing from forward to backward, of the host the value. Numbers: bitwise.
`overlap_transfers` lets copies take their time beside other work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import fx

from memopt_compile.collectives import arrived
from memopt_compile.planning.recomputing import last_of_forward, parts, recompute
from memopt_compile.step_graph import StepGraph
from memopt_compile.step_pass import StepPass
from memopt_compile.transfers import ARRIVED, FROM_HOST, HOST, SENT, TO_HOST, fetched, sent_to_host


@dataclass(frozen=True)
class Offload(StepPass):
    name: ClassVar[str] = "offload"

    def requires(self, step: StepGraph) -> str | None:
        if step.plan is None or not any(form == HOST for _, form in step.plan.packed):
            return "nothing is to wait in host memory"
        return None

    def run(self, step: StepGraph, costs: Any = None) -> None:
        named = {n.name: n for n in step.computing()}
        last = last_of_forward(step)
        behind: dict[fx.Node, fx.Node] = {}  # what has been put behind an operator, the last of it
        fetch: dict[fx.Node, Callable[[], fx.Node]] = {}
        for name in (name for name, form in step.plan.packed if form == HOST):
            place, value = last[named[name]], arrived(named[name])
            behind[place] = sent_to_host(step, value, behind.get(place, place))
            fetch[value] = partial(fetched, step, value, behind[place])
        recompute(step, parts(step, fetch), source=fetch)

    def ensures(self, step: StepGraph) -> str | None:
        early = [n.name for n in step.computing() if n.target in (TO_HOST, FROM_HOST)
                 and any(u.target not in (SENT, ARRIVED) for u in n.users)]
        return f"{early[0]} is read before it has been copied" if early else None
