"""Gather parameters for backward a second time, instead of holding them from forward (ZeRO 3).

1. A gathered parameter is the result of an ``all_gather`` of this rank's rows in forward, with its
   wait, the views of it, and what is nothing but it in another type or layout, or decoded.
2. Each one that backward reads is gathered again right before its first reader there.
3. Not so if nothing else is gathered between its last reader in forward and its first in backward:
   the parameters of the last layer are used again at once.

Before:  w = wait(all_gather(p)); a = mm(x, w); ..                              | mm(dy, w)
After:   w = wait(all_gather(p)); a = mm(x, w); ..  | w' = wait(all_gather(p)); mm(dy, w')

Memory: no parameter is whole from forward to backward but those of rule 3. One more gather of what
backward reads (biases and embeddings it does not): at most half as much communication again.
Numerics: bitwise. The collectives that come in have their places by the order of the trace alone, so
that they are the same on all ranks, whose rows may differ in number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from memopt_compile.collectives import GATHER, waits_of
from memopt_compile.planning.recomputing import recompute
from memopt_compile.quantization.operators import DEQUANTIZE
from memopt_compile.step_graph import Phase, Role, StepGraph, aliased_args, mutated_args
from memopt_compile.step_pass import StepPass

aten = torch.ops.aten
SAME_VALUES = (aten._to_copy.default, aten.clone.default)


@dataclass(frozen=True)
class GatherAgain(StepPass):
    name: ClassVar[str] = "gather_again"

    def run(self, step: StepGraph, costs: Any = None) -> None:
        place = {node: i for i, node in enumerate(step.graph.nodes)}
        launches = [n for n in step.graph.find_nodes(op="call_function", target=GATHER)
                    if step.phase(n) is Phase.FORWARD and _source(step, n) is not None]
        again: set[fx.Node] = set()
        for launch in launches:
            values = _gathered(step, launch)  # rule 1
            used = {place[u] for v in values for u in v.users if u not in values}
            later = [place[u] for v in values for u in v.users if step.phase(u) is Phase.BACKWARD]
            if not later:
                continue
            earlier = max((i for i in used if i < min(later)), default=place[launch])
            if any(earlier < place[other] < min(later) for other in launches):  # rule 3
                again |= {launch, *values, *_before(launch)}
        recompute(step, again)  # rule 2


def _source(step: StepGraph, launch: fx.Node) -> fx.Node | None:
    """The parameter whose rows are gathered: behind views, a cast, and padding on a rank with fewer."""
    node, roles = launch.args[0], step.roles()
    while node.op != "placeholder":
        if not (aliased_args(node) or node.target in (aten.constant_pad_nd.default, *SAME_VALUES)):
            return None
        node = node.args[0]
    return node if roles[node] is Role.PARAMETER else None


def _before(launch: fx.Node) -> list[fx.Node]:
    """What makes the operand of `launch` from the parameter."""
    found, node = [], launch.args[0]
    while node.op != "placeholder":
        found.append(node)
        node = node.args[0]
    return found


def _gathered(step: StepGraph, launch: fx.Node) -> list[fx.Node]:
    """Rule 1: the values of forward that are the whole parameter."""
    found = list(waits_of(launch))
    for value in found:  # which grows
        found += [u for u in value.users if u not in found and step.phase(u) is Phase.FORWARD
                  and (aliased_args(u) or u.target in (*SAME_VALUES, DEQUANTIZE)) and not mutated_args(u)]
    return found
