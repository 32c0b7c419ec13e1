"""Gather parameters in the type that they are read in (ZeRO 3, mixed precision).

1. Where every reader of a gathered parameter in forward is a cast to one smaller type, this rank's rows
   are cast, and gathered in that type. The cut of what was padded and views stay behind the gather.

Before:  w = wait(all_gather(p)); h = w.to(bfloat16)
After:   h = wait(all_gather(p.to(bfloat16)))

Memory: the parameter is never whole in the larger type; half of the bytes are communicated. Numerics:
bitwise, a cast of all rows is the cast of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from memopt_compile.collectives import GATHER, waits_of
from memopt_compile.step_graph import StepGraph, aliased_args, mutated_args
from memopt_compile.step_pass import StepPass

aten = torch.ops.aten


@dataclass(frozen=True)
class CastBeforeGather(StepPass):
    name: ClassVar[str] = "cast_before_gather"

    def run(self, step: StepGraph, costs: Any = None) -> None:
        for launch in step.graph.find_nodes(op="call_function", target=GATHER):
            views, casts = _read(launch)
            kinds = {(c.kwargs["dtype"], len(c.kwargs)) for c in casts}
            if len(kinds) == 1 and kinds < {(dtype, 1) for dtype in (torch.bfloat16, torch.float16)}:
                _cast_rows(step, launch, views, casts)


def _read(launch: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The values that are views of what is gathered, and the casts of them; no casts if anything
    else reads them."""
    views, casts = list(waits_of(launch)), []
    for view in views:  # which grows
        for user in view.users:
            if user.target is aten._to_copy.default and "dtype" in user.kwargs:
                casts.append(user)
            elif aliased_args(user) and not mutated_args(user) and user not in views:
                views.append(user)
            else:
                return views, []
    return views, casts


def _cast_rows(step: StepGraph, launch: fx.Node, views: list[fx.Node], casts: list[fx.Node]) -> None:
    dtype = casts[0].kwargs["dtype"]
    with step.graph.inserting_before(launch):
        rows = step.call(launch, aten._to_copy.default, launch.args[0], dtype=dtype)
    launch.args = (rows, *launch.args[1:])
    for node in (launch, *views):
        node.meta["val"] = node.meta["val"].to(dtype)
    for cast in casts:
        step.replace(cast, cast.args[0])
