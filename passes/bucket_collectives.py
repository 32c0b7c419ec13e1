"""Let small gradients, and small parameters, travel together: buckets of a bounded size (ZeRO's C_B).

1. Gathers, or scatters, of one group, one type and one reduction become one coalesced collective. They
   are of one phase, and of one backward, or the forward ahead of it: no bucket crosses from one to another.
2. A bucket has at most `cap_bytes` of whole tensors. Without a number that is a part (`SHARE`) of the largest
   one that the step communicates, which has to be held in any case. What is larger goes alone.
3. None of a bucket needs another one of it, through any update between them.
4. A bucket of scatters stands where its last gradient is complete, and what needs the others waits for
   it. One of gathers of parameters stands at its first one, if all of them can be read there; one of new
   parameters (their update is in between) at its last.
5. What goes into a bucket follows from sizes, which are the same on all ranks (rows are padded),
   and the order of the trace: all ranks make the same buckets.

Before:  g = wait(reduce_scatter(dw)); ..; h = wait(reduce_scatter(db)); ..
After:   g, h = reduce_scatter_coalesced([dw, db]); g = wait(g); ..; h = wait(h); ..

Memory: the gradients, or parameters, of one open bucket more, at most `cap_bytes` of each kind at a time;
nothing is copied. Numerics: bitwise.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from memopt_compile.collectives import is_collective, whole_bytes
from memopt_compile.ordering import predecessors
from memopt_compile.step_graph import Phase, StepGraph
from memopt_compile.step_pass import StepPass

c10d = torch.ops._c10d_functional
GATHER, SCATTER = c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default
COALESCED = {GATHER: c10d.all_gather_into_tensor_coalesced.default,
             SCATTER: c10d.reduce_scatter_tensor_coalesced.default}
SHARE = 4


@dataclass(frozen=True)
class BucketCollectives(StepPass):
    name: ClassVar[str] = "bucket_collectives"
    cap_bytes: int | None = None

    def requires(self, step: StepGraph) -> str | None:
        alone = [n for n in step.computing() if n.target in COALESCED]
        return None if len(alone) > 1 else "there are no two gathers or scatters"

    def run(self, step: StepGraph, costs: Any = None) -> None:
        largest = max(whole_bytes(n) for n in step.computing() if n.target in COALESCED)
        step.bucket_bytes = self.cap_bytes or largest // SHARE  # rule 2
        buckets = list(_buckets(step, step.bucket_bytes))
        order = _side_by_side(step, buckets)
        if len(order) == len(list(step.computing())):  # else two buckets need each other
            step.reorder(order)
            for bucket in buckets:
                _join(step, bucket)


def _buckets(step: StepGraph, cap: int) -> Iterator[list[fx.Node]]:
    """Those of two or more, in the order of the trace."""
    open_: dict[Any, list[fx.Node]] = {}
    before = predecessors(step, free=tuple(Phase))
    needs: dict[fx.Node, frozenset[fx.Node]] = {}  # the collectives that each node needs
    part, last = 0, None  # of the step, by changes between forward and backward
    for node in before:
        needs[node] = frozenset().union(*(needs[b] for b in before[node]), [
            b for b in before[node] if b.target in COALESCED])
        phase = step.phase(node)
        if phase is not Phase.UPDATE and phase is not last:
            part, last = part + 1, phase
        if node.target not in COALESCED or whole_bytes(node) > cap:
            continue
        key = (node.target, node.args[1:], node.args[0].meta["val"].dtype, phase, part)  # rule 1
        bucket = open_.setdefault(key, [])
        size = sum(map(whole_bytes, bucket))
        if bucket and (size + whole_bytes(node) > cap or needs[node] & {*bucket}):  # rules 2, 3
            yield from [bucket] * (len(bucket) > 1)
            bucket = open_[key] = []
        bucket.append(node)
    yield from (bucket for bucket in open_.values() if len(bucket) > 1)


def _side_by_side(step: StepGraph, buckets: list[list[fx.Node]]) -> list[fx.Node]:
    """Rule 4: the order with each bucket in one place, and right behind it what it has kept waiting."""
    before = predecessors(step, free=tuple(Phase))
    early = {bucket[0]: bucket for bucket in buckets
             if bucket[0].target is GATHER and None not in map(_makers, bucket)}
    late = {bucket[-1]: bucket for bucket in buckets if bucket[0] not in early}
    moved = {n for bucket in late.values() for n in bucket[:-1]}
    order: dict[fx.Node, None] = {}
    delayed: list[fx.Node] = []
    awaited: set[fx.Node] = set()

    def place(node: fx.Node) -> bool:
        together = late.get(node, [node])
        missing = {b for n in together for b in before[n] if b not in order}
        awaited.update(missing)
        order.update(dict.fromkeys([] if missing else together))
        return not missing

    for node in before:
        if node in order or node in moved:
            continue
        for n in early.get(node, ()):
            order.update(dict.fromkeys([*_makers(n), n]))
        if node not in order and not place(node):
            delayed.append(node)
        elif not awaited.isdisjoint(late.get(node, [node])):
            while any(ready := [n for n in delayed if n not in order and place(n)]):
                delayed = [n for n in delayed if n not in ready]
    return list(order)


def _join(step: StepGraph, bucket: list[fx.Node]) -> None:
    """Rule 1, of collectives that stand side by side."""
    with step.graph.inserting_before(bucket[-1]):
        launch = step.call(bucket[-1], COALESCED[bucket[-1].target], [n.args[0] for n in bucket],
                           *bucket[-1].args[1:])
        for i, node in enumerate(bucket):
            step.replace(node, step.call(node, operator.getitem, launch, i))


def _makers(launch: fx.Node) -> list[fx.Node] | None:
    """The chain of operators that makes the operand of `launch` from an input, so that it can stand
    anywhere; None if there is none."""
    found, node = [], launch.args[0]
    while node.op != "placeholder":
        if len(node.all_input_nodes) != 1 or is_collective(node):
            return None
        found.append(node)
        node = node.all_input_nodes[0]
    return found[::-1]
