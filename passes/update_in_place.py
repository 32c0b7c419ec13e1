"""Update parameters in few bits, and states in few bits, where they are.

Captured, such an update is one operator from the old codes to new ones, which a ``copy_`` then writes over the
old (`optim.one_operator`): an array of the parameter's size, and one more for each state, lives in between.
This pass gives the operator its in-place form. The numbered rules are cited in the code.

1. All results of the operator or none: each operand is an input of the step, or what was written to one, and
   fills it; and the step writes to that input later, the result or what is computed from it. Or the operand is what
   the step has made, whole, and nothing reads that later.
2. From the operator to that write nothing else touches the input: what reads the old value stands before the
   operator. Behind the write nothing reads the result, unless that is what is written and stays to the end; and
   the step does not return it.
3. If it does not fit where it is, the operator may stand where its first result is read: the parameter is read
   by backward till then.
4. ``copy_(m, m)`` takes the result's place if anything reads it. It copies nothing, and says that what reads
   it comes behind the operator.

Before:  m1 = quantized_update([], [g1], [m], ..); p2, m2 = quantized_update([p], [g2], [m1], ..); p := p2; m := m2
After:   quantized_update_([], [g1], [m], ..); m1 = (m := m); quantized_update_([p], [g2], [m1], ..)

Memory: the results are gone. Numerics: bitwise; the body is the same.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from memopt_compile.collectives import readers
from memopt_compile.optim.one_operator import QUANTIZED_UPDATE, QUANTIZED_UPDATE_
from memopt_compile.step_graph import StepGraph, mutated_args, storage_roots
from memopt_compile.step_pass import StepPass

COPY = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class UpdateInPlace(StepPass):
    name: ClassVar[str] = "update_in_place"

    def run(self, step: StepGraph, costs: Any = None) -> None:
        updates = [node for node in step.computing() if node.target is QUANTIZED_UPDATE]
        places = _Places(step) if updates else None
        for node in updates:
            writes = places.writes(node)
            if not writes and places.put_off(node):
                writes = places.writes(node)
            if writes:
                places.rewrite(step, node, writes)


def _items(node: fx.Node) -> dict[int, fx.Node]:
    return {item.args[1]: item for item in node.users if item.target is operator.getitem}


def _operands(node: fx.Node) -> list[fx.Node]:
    """The operand of each result."""
    return [*node.args[0], *node.args[2]]


class _Places:
    """What lives in the storages of the inputs, kept up to date while results move there."""

    def __init__(self, step: StepGraph) -> None:
        self.roots = storage_roots(step.graph)
        self.members: dict[fx.Node, set[fx.Node]] = {}
        for node, roots in self.roots.items():
            for root in roots:
                self.members.setdefault(root, set()).add(node)

    def writes(self, node: fx.Node) -> list[fx.Node | None]:
        """The next write to the place of each result, if all of them fit (rules 1 and 2); None where none comes."""
        items, places = _items(node), _operands(node)
        owners = [owner for place in places for owner in self.roots[place]]
        read = {owner for each in (*node.args[1], *node.args[7]) for owner in self.roots[each]}
        if not len(owners) == len(set(owners) - read) == len(places) == len(items):
            return []
        found: list[fx.Node | None] = []
        for i, (place, owner) in enumerate(zip(places, owners)):
            later = {t for m in self.members[owner] for t in (m, *readers(m)) if node < t}
            if owner.op == "call_function" and not later and place.meta["val"].shape == owner.meta["val"].shape:
                found.append(None)
                continue
            touches = {t for t in later if t.op != "output"}
            write = min(touches, default=None)
            if (owner.op != "placeholder" or write is None or write.target is not COPY
                    or self.roots[write.args[0]] != {owner} or owner in self.roots[write.args[1]]
                    or len({str(n.meta["val"].numel()) for n in (place, owner, write.args[0])}) > 1  # symbols
                    or not self._may_stay(items[i], write, owner, touches)):
                return []
            found.append(write)
        return found

    def _may_stay(self, item: fx.Node, write: fx.Node, owner: fx.Node, touches: set[fx.Node]) -> bool:
        """Whether what reads the result behind the write may read the input there. (The step may not return it:
        that is to be the caller's own.)"""
        late = {user for m in self.members[item] for user in readers(m) if write < user}
        return not late or write.args[1] is item and not any(user.op == "output" for user in late) and not any(
            write < t and any(owner in self.roots[a] for a in mutated_args(t)) for t in touches)

    def put_off(self, node: fx.Node) -> bool:
        """Rule 3, if its operands are then what they are now."""
        items = list(_items(node).values())
        given = {root for each in node.all_input_nodes for root in self.roots[each]}
        first, between = min({u for item in items for u in item.users}, default=node), node.next
        while between < first:
            if any(self.roots[each] & given for each in mutated_args(between)):
                return False
            between = between.next
        for each in (node, *items) if first is not node else ():
            first.prepend(each)
        return first is not node

    def rewrite(self, step: StepGraph, node: fx.Node, writes: list[fx.Node | None]) -> None:
        items = _items(node)
        for i, place in reversed(list(enumerate(_operands(node)))):
            write = writes[i]
            (owner,) = self.roots[place]
            with step.graph.inserting_after(node):
                now = step.call(node, COPY, place, place)
            self.roots[now] = self.roots[place]
            self.members[owner].add(now)
            if write is None:
                pass
            elif write.args[1] is items[i]:
                self.members[owner].discard(write)
                step.replace(write, now)
            else:
                write.args = (now, *write.args[1:])
            for view in self.members.pop(items[i]):  # the next operator may be of this place too
                self.roots[view] = self.roots[view] - {items[i]} | {owner}
                self.members[owner].add(view)
            self.members[owner].discard(items[i])
            step.replace(items[i], now)
            if not now.users:
                self.members[owner].discard(now)
                step.erase(now)
        node.target, node.meta["val"] = QUANTIZED_UPDATE_, None
