"""Write a parameter or state that is updated more than once back after each of its updates.

Two updates in a step (two epochs over the same samples, a critic's several, Lookahead) are functional: what the first
comes to is a value of its own, beside what it was made of, until the last is written at the end. The rules:

1. The line of an input s that is written once, at its end, goes from what is written to s: each value is made of the one
   before, its operand that is scaled or added to (`SELF`), all of the type and shape of s.
2. What an update comes to is the last of the line in front of the first gradient of a later backward; so is what is written at
   the end, if another backward follows (through a critic, after its update).
3. It is written to s where it stands, and read in s from then on, if nothing behind it reads what was in s before, nor a
   view of that, nothing behind the next write reads it, and neither it nor a view of it is a result of the step. Else it
   is left as it is.

Before:  p1 = p - g1; loss2 = f(p1); g2 = ..; p2 = p1 - g2; p := p2
After:   p1 = p - g1; p := p1; loss2 = f(p); g2 = ..; p2 = p - g2; p := p2

Memory: parameters and states are there once, not once for each update. Numerics: bitwise. The eager lowering writes all of these in
place already (`reuse_buffers`). A step that is written to so early cannot be taken back (`check_finite`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from memopt_compile.step_graph import OPERATOR, Role, StepGraph, alike, storage_roots
from memopt_compile.step_pass import StepPass

COPY = torch.ops.aten.copy_.default
SELF = {"aten::add": 0, "aten::sub": 0, "aten::mul": 0, "aten::div": 0, "aten::lerp": 0, "aten::addcmul": 0, "aten::addcdiv": 0,
        "prims::fma": 2}


@dataclass(frozen=True)
class WriteEachUpdate(StepPass):
    name: ClassVar[str] = "write_each_update"

    def requires(self, step: StepGraph) -> str | None:
        if step.windows:
            return "ranks share parameters"
        return None if len(set(step.gradients.values())) > 1 else "the step has no second backward"

    def run(self, step: StepGraph, costs: object = None) -> None:
        roles, held = step.roles(), defaultdict[fx.Node, list[fx.Node]](list)
        for node, owners in storage_roots(step.graph).items():
            for owner in owners:
                held[owner].append(node)
        first: dict[int, fx.Node] = {}  # gradient of each backward
        for node in sorted(step.gradients):
            first.setdefault(step.gradients[node], node)
        for write in [n for n in step.computing() if n.target is COPY]:
            state = write.args[0]
            if roles.get(state) in (Role.PARAMETER, Role.STATE) and state.meta["val"].dim() and (
                    sum(n.target is COPY for n in held[state]) == 1):
                for value in reversed(list(_updates(write, first.values()))):
                    _write(step, write, value, held[state], held[value])


def _updates(write: fx.Node, first: Collection[fx.Node]) -> Iterator[fx.Node]:
    """Rules 1 and 2: what the updates of the input that is written come to, the latest first."""
    state, final = write.args[:2]
    line = [final]
    while line[-1] is not state:
        if (before := _made_of(line[-1])) is None or not alike(before, state):
            return
        line.append(before)
    behind: fx.Node | None = None  # the update behind, or what is written at the end
    for value in line[:-1]:
        if any(g < value for g in first) and any(value < g and (behind is None or g < behind) for g in first):
            yield value
            behind = value
        elif value is final:
            behind = final


def _made_of(node: fx.Node) -> fx.Node | None:
    name = node.target._schema.name if isinstance(node.target, OPERATOR) else ""
    found = node.args[SELF[name]] if name in SELF else None
    return found if isinstance(found, fx.Node) else None


def _write(step: StepGraph, last: fx.Node, value: fx.Node, shared: list[fx.Node], views: list[fx.Node]) -> None:
    """Rule 3, for an input that is written `last` and whose storage `shared` has, and `value`, that `views` show."""
    final = value is last.args[1]
    late = (user for n in shared for user in n.users if value < user and not (user.target is COPY and user.args[0] is n))
    later = (user for n in views for user in n.users if user.op == "output" or not final and last < user)
    if any(late) or any(later):
        return
    early = last
    if final:
        value.append(last)
    else:
        with step.graph.inserting_after(value):
            early = step.graph.call_function(COPY, (last.args[0], value))
        early.meta = {**value.meta, "val": last.meta["val"]}
        last.args = (early, *last.args[1:])
        shared += [early, *views]
    step.phases[early] = step.phase(value)
    for user in [user for user in value.users if user is not early]:
        user.replace_input_with(value, early)
