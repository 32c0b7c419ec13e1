"""Compute the loss layer for a part of the rows at a time, forward and backward together.

Of tokens N and a vocabulary V the logits h·Wᵀ are a matrix [N, V], and so are their log-softmax and
its gradient: usually the peak of the step. In a whole step the gradient of the loss is known before
the loss is, so that every row can go from its hidden state to the gradient of that by itself.

1. A mean or sum of `nll_loss` becomes one loss for each target, summed up and divided by the number
   of targets that count, or by the sum of their class weights: neither needs logits. So becomes one of
   `binary_cross_entropy_with_logits` or `huber_loss`, and any mean a sum. Gradients of such losses (`mse_loss`) are of each number.
2. Loops over the samples are joined (`row_loops`). Classes in the middle go last (`row_classes`); logits of rows that nobody
   reads (a shift against the targets) are not made (`row_slices`); where a row's gradient depends on all rows, logits are
   computed twice (`row_twice`).
3. The region of the logits is found by `row_regions`: their rows from forward on, up to products back to
   narrow rows and to sums over rows. What has none is refused with the reason.
4. The region is computed once for each part of the rows, all of it before backward goes on. Its rows
   are joined, its sums added up, those of 16-bit numbers in float32.
5. What such rows need of the backward (the 1 it starts from, 1/N) moves in front of them.
6. More parts are tried until the region fits by itself. Those with the lowest predicted peak of the step
   are taken, of equal ones those with the lowest in the region; none if the step's does not fall.
7. What forward reads in a region and backward would compute again (`rematerialize_free`: a weight in 16 bits) is made once.

Before:  z = h·Wᵀ; p = log_softmax(z); loss = −Σ p[y]; dz = exp(p) − 1[y]; dh = dz·W; dW = dzᵀ·h
After:   for rows i: z = hᵢ·Wᵀ; p = ..; lossᵢ = ..; dz = ..; dhᵢ = dz·W; dW = dW + dzᵀ·hᵢ
         loss = Σ lossᵢ; dh = [dh₁, dh₂, ..]

Memory: of every wide value one part is alive. The sum of dW takes a second dW at most. Time: the same
products, cut. Numbers: equal but for the order of sums.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import fx

from memopt_compile.liveness import Timeline, no_workspace, timeline
from memopt_compile.ordering import fuses, reduces_little
from memopt_compile.row_classes import classes_last
from memopt_compile.row_loops import loops_joined
from memopt_compile.row_regions import Region, region_of, regions
from memopt_compile.row_slices import slice_first
from memopt_compile.row_twice import computed_twice
from memopt_compile.rowwise import (
    COLUMNS,
    OF_EACH,
    ROWS,
    SHORT,
    SUM,
    WHOLE,
    Rule,
    lead,
    reduction_of,
    sized,
)
from memopt_compile.step_graph import (
    OPERATOR,
    Phase,
    StepGraph,
    first_stale_read,
    storage_roots,
)
from memopt_compile.step_pass import Numerics, StepPass

aten = torch.ops.aten
NLL = aten.nll_loss_forward.default
REMEMBERED = 20  # steps


@dataclass(frozen=True)
class ChunkLogits(StepPass):
    """`peak_bytes` is the budget: a step that fits, or has a plan that does, is left alone. `parts`
    are tried in their order."""

    name: ClassVar[str] = "chunk_logits"
    numerics: ClassVar[Numerics] = Numerics.REORDERED
    peak_bytes: int
    parts: tuple[int, ...] = (2, 4, 8, 16)

    def requires(self, step: StepGraph) -> str | None:
        found = regions(prepared(step.copy())).values()
        reasons = [r for r in found if isinstance(r, str)]
        return None if len(reasons) < len(found) else (
            reasons[0] if reasons else "no loss is computed from the rows of a wide matrix product")

    def run(self, step: StepGraph, costs: Any = None) -> None:
        costs = costs or no_workspace
        start = timeline(step, costs)
        if start.peak_bytes <= self.peak_bytes or step.plan is not None and step.plan.fits:
            return
        best, lowest = None, (start.transient_peak_bytes, 0)
        ready, weights = None, _weights(start, costs)
        for parts in self.parts:  # rule 6
            if parts not in weights:
                ready = ready or prepared(step.copy())
                weights[parts] = _weight(ready.copy(), parts, costs)
            if (weight := weights[parts]) is None:
                continue
            if weight < lowest:
                best, lowest = parts, weight
            if weight[1] + start.resident_bytes <= self.peak_bytes:
                break
        if best is not None:
            chunked(prepared(step), best)


def _weight(step: StepGraph, parts: int, costs: Any) -> tuple[int, int] | None:
    """Transient peaks of `step` in so many parts, all of it and inside of the parts; None if it cannot be."""
    written = set(chunked(step, parts))
    if first_stale_read(step.graph):  # a weight is updated where a part would be computed too late, or too early
        return None
    points = timeline(step, costs).points
    return max(p.live_bytes for p in points), max((p.live_bytes for p in points if p.node in written), default=0)


_known: dict[bytes, dict[int, tuple[int, int] | None]] = {}


def _weights(start: Timeline, costs: Any) -> dict[int, tuple[int, int] | None]:
    """What `_weight` said by parts of the step of `start`: each limit that a budget comes by asks for the same step again."""
    text = "".join(f"{p.node.name} {p.node.target} {p.node.args} {p.node.kwargs} {p.live_bytes};" for p in start.points)
    key = hashlib.sha256(f"{hasattr(costs, 'fused')} {text}".encode()).digest()
    known = _known[key] = _known.pop(key, {})
    if len(_known) > REMEMBERED:
        del _known[next(iter(_known))]
    return known


def chunked(step: StepGraph, parts: int) -> list[fx.Node]:
    """Compute every region of `step`, which is prepared, in so many parts; the nodes that do."""
    found, written = regions(step), list[fx.Node]()
    for product in [n for n, region in found.items() if isinstance(region, Region) and region.rows >= parts]:
        region = region_of(step, product)  # anew: it may read another's results
        if isinstance(region, Region) and _share_operands(step, region):
            region = region_of(step, product)
        if isinstance(region, Region):
            written += _Chunks(step, region).write(parts)
    return written


def _share_operands(step: StepGraph, region: Region) -> bool:
    """Rule 7; whether there is anything. (Or what makes an operand again for backward would move in front by rule 5.)"""
    inside, roots = region.rules, storage_roots(step.graph)
    equal: dict[fx.Node, fx.Node] = {}  # the first of those that are computed from the same in the same way
    first: dict[str, fx.Node] = {}
    for node in itertools.takewhile(lambda n: n is not max(inside), step.graph.nodes):
        text = f"{node.target} {fx.map_arg((node.args, node.kwargs), equal.__getitem__)}"
        equal[node] = first.setdefault(text, node) if _is_free(node) else node
    read = {a for node in inside for a in node.all_input_nodes if a not in inside}
    there = {root for a in read if equal[a] is a for root in roots[a]}
    again = sorted(a for a in read if equal[a] is not a and roots[equal[a]] & there)
    for operand in again:
        operand.replace_all_uses_with(equal[operand], delete_user_cb=inside.__contains__)
    stack = list(again)
    while stack:
        if not (node := stack.pop()).users and _is_free(node) and not node._erased:
            stack += node.all_input_nodes
            step.erase(node)
    return bool(again)


def _is_free(node: fx.Node) -> bool:
    return fuses(node) or reduces_little(node)


def prepared(step: StepGraph) -> StepGraph:
    """Rules 1 and 2, in place."""
    return computed_twice(plain_losses(slice_first(classes_last(loops_joined(plain_losses(step))))))


def plain_losses(step: StepGraph) -> StepGraph:
    """Rule 1."""
    for node in step.graph.find_nodes(op="call_function", target=NLL):
        logs, targets, weight, reduction, ignored = node.args
        if logs.meta["val"].dim() != 2 or reduction == 0 and not any(item.args[1] for item in node.users):
            continue
        with step.graph.inserting_before(node):
            counts = step.call(node, aten.ne.Scalar, targets, ignored)
            if weight is not None:  # what is ignored may be no class
                classes = step.call(node, aten.mul.Tensor, targets, counts)
                weights = step.call(node, aten.index_select.default, weight, 0, classes)
                counts = step.call(node, aten.mul.Tensor, weights, counts)
            counted = step.call(node, aten.sum.default, counts)
            count = step.call(node, aten._to_copy.default, counted, dtype=logs.meta["val"].dtype)
        total = node.meta["val"][1]
        node.args = (logs, targets, weight, 0, ignored)
        node.meta["val"] = (logs.meta["val"].new_empty(targets.meta["val"].shape), total)
        for item in list(node.users):
            if item.args[1] == 1:
                step.replace(item, count)
            elif reduction != 0:
                item.meta["val"], users = node.meta["val"][0], list(item.users)
                with step.graph.inserting_before(item.next):
                    loss = step.call(node, aten.sum.default, item)
                    if reduction == 1:
                        loss = step.call(node, aten.div.Tensor, loss, count)
                for user in users:
                    user.replace_input_with(item, loss)
    for node in list(step.computing()):
        if isinstance(node.target, OPERATOR) and node.target._schema.name in OF_EACH and (how := reduction_of(node)):
            place, shape = OF_EACH[node.target._schema.name], list(node.meta["val"].shape)
            args = [*node.args, *[None] * (place + 1 - len(node.args))]
            args[place] = 0
            if not node.target._schema.name.endswith("backward"):
                with step.graph.inserting_before(node):
                    each = step.call(node, node.target, *args)
                    step.replace(node, step.call(node, (aten.mean.default, aten.sum.default)[how - 1], each))
            elif all(type(size) is int for size in shape):
                with step.graph.inserting_before(node):
                    each = step.call(node, aten.div.Tensor, args[0], prod(shape)) if how == 1 else args[0]
                    node.args = (step.call(node, aten.expand.default, each, shape), *args[1:])
    for node in step.graph.find_nodes(op="call_function", target=aten.mean.default):
        count, dtype = node.args[0].meta["val"].numel(), node.meta["val"].dtype
        if type(count) is int:
            with step.graph.inserting_before(node):
                total = step.call(node, aten.sum.default, *node.args, dtype=torch.float32 if dtype in SHORT else dtype)
                mean = step.call(node, aten.div.Tensor, total, count)
                step.replace(node, step.call(node, aten._to_copy.default, mean, dtype=dtype) if dtype in SHORT else mean)
    return step


class _Chunks:
    """Writes a region in parts, in front of where its product stands."""

    def __init__(self, step: StepGraph, region: Region):
        self.step, self.region = step, region
        forward = all(step.phase(node) is Phase.FORWARD for node in region.rules)
        self.phase = Phase.FORWARD if forward else Phase.BACKWARD
        self.flat: dict[fx.Node, fx.Node] = {}  # operands from outside with one dimension of rows
        self.written: list[fx.Node] = []

    def write(self, parts: int) -> list[fx.Node]:
        step, region = self.step, self.region
        for node in region.moved:  # rule 5
            if region.product < node:  # another region may have moved it further
                region.product.prepend(node)
        size = -(-region.rows // parts)
        with step.graph.inserting_before(region.product):
            joined: dict[fx.Node, Any] = {}
            for start in range(0, region.rows, size):
                self._part(start, min(start + size, region.rows), joined)
            ends = {node: self._end(node, joined[node]) for node in region.results}
        for node, end in ends.items():
            node.replace_all_uses_with(end)
            if node in step.gradients:
                step.gradients[end] = step.gradients[node]
        for node in region.late:
            region.product.prepend(node)
        for node in reversed(region.rules):
            if not node.users:
                step.erase(node)
        return self.written

    def _part(self, start: int, end: int, joined: dict[fx.Node, Any]) -> None:
        """Rule 4 for the rows from `start` to `end`: results go into `joined`."""
        part: dict[tuple[fx.Node, str], fx.Node] = {}

        def operand(value: fx.Node, need: str) -> fx.Node:
            if need == WHOLE:
                return value
            if (value, need) not in part:
                dimension = 1 if need == COLUMNS else 0
                source = value if need == COLUMNS else self._flat(value)
                part[value, need] = self._call(value, aten.slice.Tensor, source, dimension, start, end)
            return part[value, need]

        for node, how in self.region.rules.items():
            given = {value: operand(value, need) for value, need in how.needs.items()}
            if how.target is None:
                (part[node, how.result],) = given.values()
            elif how.result == SUM:
                args = fx.map_arg(how.args, given.__getitem__)
                joined[node] = self._add(node, joined.get(node), how, args)
            else:
                args = sized(fx.map_arg(how.args, given.__getitem__), end - start)
                part[node, how.result] = self._call(node, how.target, *args, **how.kwargs)
            if how.result == ROWS and node in self.region.results:
                joined.setdefault(node, []).append(part[node, ROWS])

    def _flat(self, value: fx.Node) -> fx.Node:
        fake = value.meta["val"]
        front = lead(fake, self.region.rows)
        if front == 1:
            return value
        if value not in self.flat:
            shape = [self.region.rows, *fake.shape[front:]]
            source = value if fake.is_contiguous() else self._call(
                value, aten.clone.default, value, memory_format=torch.contiguous_format)
            self.flat[value] = self._call(value, aten.view.default, source, shape)
        return self.flat[value]

    def _add(self, node: fx.Node, total: fx.Node | None, how: Rule, args: tuple) -> fx.Node:
        """`total` and what this part adds to it."""
        short = node.meta["val"].dtype in SHORT
        if total is not None and how.target is aten.mm.default and not short:
            return self._call(node, aten.addmm.default, total, *args)
        term = self._call(node, how.target, *args, **how.kwargs)
        if total is not None:
            return self._call(node, aten.add.Tensor, total, term)  # in the type of the sum
        return self._call(node, aten._to_copy.default, term, dtype=torch.float32) if short else term

    def _end(self, node: fx.Node, joined: Any) -> fx.Node:
        """The value of `node`, from what the parts have left."""
        value = node.meta["val"]
        if isinstance(joined, list):
            joined = self._call(node, aten.cat.default, joined, 0)
        if joined.meta["val"].dtype != value.dtype:
            joined = self._call(node, aten._to_copy.default, joined, dtype=value.dtype)
        if joined.meta["val"].shape != value.shape:
            joined = self._call(node, aten.view.default, joined, list(value.shape))
        return joined

    def _call(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.step.call(like, target, *args, **kwargs)
        self.step.phases[node] = self.phase
        self.written.append(node)
        return node
