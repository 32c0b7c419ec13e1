"""Write a state back after each gradient that enters it, so that the gradient can die.

An optimizer that takes the gradients of micro-batches one by one (AdamA) goes through several values
of its state in one step. Functionalization leaves them as values of their own, with one write at the
end: every gradient, or every value, would live until then. The numbered rules are cited in the code.

1. A value a of state s is complete once the last node of forward or backward that it needs has run.
   Where what the step writes to s at its end is complete later, and is computed from one such a of
   the type and shape of s, a is written to s. Of several that is the one computed from s: CAME's factors of
   two averages are alike, and one average enters the other. If what is complete later reads no such a, it may be
   read by what computes on from it where it is complete (codes are decoded there).
2. Nothing but what a is computed from may read the earlier value of s: it is gone after that.
3. The write, and what it needs, stand where a is complete, and count as backward from then on.

Before:  g1 = ..; g2 = ..; m1 = m + g1; m2 = m1 + g2; m := m2
After:   g1 = ..; m1 = m + g1; m := m1; g2 = ..; m2 = m + g2; m := m2

Memory: a gradient lives as long as it takes to fold it; the codes of a sum in few bits, of which the step
does not read what was there before, are in their state and nowhere else. Numerics: bitwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from memopt_compile.ordering import is_collective, is_random
from memopt_compile.step_graph import Phase, Role, StepGraph, alike, storage_roots
from memopt_compile.step_pass import StepPass

COPY = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class WriteBackEarly(StepPass):
    name: ClassVar[str] = "write_back_early"

    def requires(self, step: StepGraph) -> str | None:
        return None if step.kind == "step" else "a graph without an update has no state to write"

    def run(self, step: StepGraph, costs: Any = None) -> None:
        backbone = [n for n in step.computing() if step.phase(n) is not Phase.UPDATE]
        complete = _complete(step, backbone)
        roots = storage_roots(step.graph)
        due: dict[int, list[fx.Node]] = {}  # by place in the backbone, the writes that go behind it
        for write in _last_writes(step):
            for level, value in sorted(_versions(step, write, complete).items()):
                if _can_replace(step, value, write, roots):  # rule 2
                    early = _write(step, value, write, complete)
                    roots[early] = roots[write.args[0]]
                    write.args = (early, *write.args[1:])
                    due.setdefault(level, []).append(early)
        position = {node: i for i, node in enumerate(step.graph.nodes)}
        for level, writes in sorted(due.items()):  # rule 3
            where = backbone[level]
            for node in sorted(_update_needs(step, writes), key=position.__getitem__):
                where.append(node)
                step.phases[node] = Phase.BACKWARD
                where = node


def _last_writes(step: StepGraph) -> list[fx.Node]:
    """Of every optimizer state that is a tensor with dimensions and is written once, that write."""
    found = []
    for node, role in step.roles().items():
        writes = [u for u in node.users if u.target is COPY and u.args[0] is node]
        if role is Role.STATE and node.meta["val"].dim() and len(writes) == 1:
            found += [w for w in writes if step.phase(w) is Phase.UPDATE]
    return found


def _complete(step: StepGraph, backbone: list[fx.Node]) -> dict[fx.Node, int]:
    """For each node the last place in `backbone` that it needs, -1 for none."""
    at = {node: i for i, node in enumerate(backbone)}
    complete: dict[fx.Node, int] = {}
    for node in step.graph.nodes:
        complete[node] = max((complete[a] for a in node.all_input_nodes), default=-1)
        complete[node] = max(complete[node], at.get(node, -1))
    return complete


def _versions(step: StepGraph, write: fx.Node, complete: dict[fx.Node, int]) -> dict[int, fx.Node]:
    """Rule 1: by where they are complete, the earlier values of the state that is written."""
    state, final = write.args[0], write.args[1]
    found: dict[int, set[fx.Node]] = {}
    decoded: dict[int, set[fx.Node]] = {}  # read by what is complete later, not alike
    seen, stack = {final}, [final]
    while stack:
        node = stack.pop()
        for value in node.all_input_nodes:
            if value.op == "placeholder" or step.phase(value) is not Phase.UPDATE:
                continue
            if -1 < complete[value] < complete[node]:
                kind = found if alike(value, state) else decoded
                kind.setdefault(complete[value], set()).add(value)
            if value not in seen:
                seen.add(value)
                stack.append(value)
    for level, values in decoded.items():
        if level not in found:
            found[level] = _sources(step, values, lambda n, level=level: complete[n] == level, state)
    for level, values in found.items():
        if len(values) > 1:
            found[level] = {value for value in values if _is_from(step, value, state)}
    return {level: values.pop() for level, values in found.items() if len(values) == 1}


def _is_from(step: StepGraph, value: fx.Node, state: fx.Node) -> bool:
    """Whether the update computes `value` from `state`."""
    return any(state in node.all_input_nodes for node in _update_needs(step, [value]))


def _sources(step: StepGraph, values: set[fx.Node], here: Callable[[fx.Node], bool],
             state: fx.Node) -> set[fx.Node]:
    """The nearest values like `state` from which `values` are computed, all of the update and `here`."""
    found, seen, stack = set(), set(values), list(values)
    while stack:
        for value in stack.pop().all_input_nodes:
            if value in seen or step.phase(value) is not Phase.UPDATE or not here(value):
                continue
            seen.add(value)
            if alike(value, state):
                found.add(value)
            else:
                stack.append(value)
    return found


def _can_replace(step: StepGraph, value: fx.Node, write: fx.Node,
                 roots: dict[fx.Node, frozenset[fx.Node]]) -> bool:
    """Whether `value` needs everything that reads the state as it is before, may be computed
    earlier, and is not itself wanted after the step."""
    state, needs = write.args[0], _update_needs(step, [value])
    (owner,) = roots[state]
    views = [n for n in needs if owner in roots[n]]
    readers = {u for n in [state, *views] for u in n.users} - {write}
    if readers and not any(state in n.all_input_nodes for n in needs):
        return False
    return (readers <= needs
            and not any(is_random(n) or is_collective(n) for n in needs)
            and not any(u.op == "output" for u in value.users))


def _write(step: StepGraph, value: fx.Node, write: fx.Node, complete: dict[fx.Node, int]) -> fx.Node:
    """Write `value` behind itself; what is complete later reads it in the state."""
    state = write.args[0]
    with step.graph.inserting_after(value):
        early = step.graph.call_function(COPY, (state, value))
    early.meta = {**value.meta, "val": state.meta["val"]}
    step.phases[early], complete[early] = Phase.UPDATE, complete[value]
    for user in list(value.users):
        if user not in (early, write):
            user.replace_input_with(value, early)
    return early


def _update_needs(step: StepGraph, nodes: list[fx.Node]) -> set[fx.Node]:
    """`nodes` and what of the update they need."""
    found, stack = set(), list(nodes)
    while stack:
        node = stack.pop()
        if node not in found and node.op != "placeholder" and step.phase(node) is Phase.UPDATE:
            found.add(node)
            stack += node.all_input_nodes
    return found
