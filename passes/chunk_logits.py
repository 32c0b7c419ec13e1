"""Compute the loss layer for a part of the rows at a time, forward and backward together.

Of tokens N and a vocabulary V the logits h·Wᵀ are a matrix [N, V], and so are their log-softmax and
its gradient: usually the peak of the step. In a whole step the gradient of the loss is known before
the loss is, so that every row can go from its hidden state to the gradient of that by itself.

1. A mean or sum of `nll_loss` becomes one loss for each target, summed up and divided by the number
   of targets that count: that number needs no logits.
2. The region of a product [N, V] of forward is what its rows flow through (`rowwise.rule`), up to
   products back to narrow rows and to sums over rows; and whatever else as wide is made for it alone.
3. Nothing else may read a wide value of the region (a step that returns its logits, say), nor may it
   depend on a result of the region (a gradient scaled by the loss): that is refused.
4. The region is computed once for each part of the rows, all of it before backward goes on. Its rows
   are joined, its sums added up, those of 16-bit numbers in float32.
5. What such rows need of the backward (the 1 it starts from, 1/N) moves in front of them.
6. More parts are tried until the region fits by itself. Those with the lowest predicted peak of the step
   are taken, of equal ones those with the lowest in the region; none if the step's does not fall.

Before:  z = h·Wᵀ; p = log_softmax(z); loss = −Σ p[y]; dz = exp(p) − 1[y]; dh = dz·W; dW = dzᵀ·h
After:   for rows i: z = hᵢ·Wᵀ; p = ..; lossᵢ = ..; dz = ..; dhᵢ = dz·W; dW = dW + dzᵀ·hᵢ
         loss = Σ lossᵢ; dh = [dh₁, dh₂, ..]

Memory: of every wide value one part is alive. The sum of dW takes a second dW at most. Time: the same
products, cut. Numbers: equal but for the order of sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from memopt_compile.liveness import no_workspace, timeline
from memopt_compile.ordering import is_collective, is_random
from memopt_compile.rowwise import (
    COLUMNS,
    PRODUCTS,
    ROWS,
    SIZE,
    SUM,
    WHOLE,
    Rule,
    lead,
    rule,
    width,
)
from memopt_compile.step_graph import Phase, StepGraph, mutated_args, op_name
from memopt_compile.step_pass import Numerics, StepPass

aten = torch.ops.aten
NLL = aten.nll_loss_forward.default
SHORT = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Region:
    """What is computed in parts: `rules` in schedule order, from the product on; of its values
    `results` are read outside. `moved` is what it reads that is made behind the product."""

    product: fx.Node
    rows: int
    rules: dict[fx.Node, Rule]
    results: tuple[fx.Node, ...]
    moved: tuple[fx.Node, ...]


@dataclass(frozen=True)
class ChunkLogits(StepPass):
    """`peak_bytes` is the budget: a step that fits, or has a plan that does, is left alone. `parts`
    are tried in their order."""

    name: ClassVar[str] = "chunk_logits"
    numerics: ClassVar[Numerics] = Numerics.REORDERED
    peak_bytes: int
    parts: tuple[int, ...] = (2, 4, 8, 16)

    def requires(self, step: StepGraph) -> str | None:
        found = regions(plain_losses(step.copy()))
        reasons = [r for r in found if isinstance(r, str)]
        return None if len(reasons) < len(found) else (
            reasons[0] if reasons else "no loss is computed from the rows of a wide matrix product")

    def run(self, step: StepGraph, costs: Any = None) -> None:
        costs = costs or no_workspace
        start = timeline(step, costs)
        if start.peak_bytes <= self.peak_bytes or step.plan is not None and step.plan.fits:
            return
        best, lowest = None, (start.transient_peak_bytes, 0)
        for parts in self.parts:  # rule 6
            twin = step.copy()
            written = set(chunked(twin, parts))
            points = timeline(twin, costs).points
            inside = max((p.live_bytes for p in points if p.node in written), default=0)
            weight = max(p.live_bytes for p in points), inside
            if weight < lowest:
                best, lowest = parts, weight
            if inside + start.resident_bytes <= self.peak_bytes:
                break
        if best is not None:
            chunked(step, best)


def chunked(step: StepGraph, parts: int) -> list[fx.Node]:
    """Compute every region of `step` in so many parts; the nodes that do."""
    return [node for region in regions(plain_losses(step))
            if isinstance(region, Region) and region.rows >= parts
            for node in _Chunks(step, region).write(parts)]


def plain_losses(step: StepGraph) -> StepGraph:
    """Rule 1, for the losses without class weights."""
    for node in step.graph.find_nodes(op="call_function", target=NLL):
        logs, targets, weight, reduction, ignored = node.args
        if weight is not None or logs.meta["val"].dim() != 2:
            continue
        with step.graph.inserting_before(node):
            counted = _call(step, node, aten.sum.default, _call(
                step, node, aten.ne.Scalar, targets, ignored))
            count = _call(step, node, aten._to_copy.default, counted, dtype=logs.meta["val"].dtype)
        total = node.meta["val"][1]
        node.args = (logs, targets, None, 0, ignored)
        node.meta["val"] = (logs.meta["val"].new_empty(targets.meta["val"].shape), total)
        for item in list(node.users):
            if item.args[1] == 1:
                step.replace(item, count)
            elif reduction != 0:
                item.meta["val"], users = node.meta["val"][0], list(item.users)
                with step.graph.inserting_before(item.next):
                    loss = _call(step, node, aten.sum.default, item)
                    if reduction == 1:
                        loss = _call(step, node, aten.div.Tensor, loss, count)
                for user in users:
                    user.replace_input_with(item, loss)
    return step


# ----------------------------------------------------------------------------- finding


def regions(step: StepGraph) -> list[Region | str]:
    """The regions of `step`; for a product that has none the reason. The largest come first."""
    order = list(step.graph.nodes)
    place = {node: i for i, node in enumerate(order)}
    products = [n for n in order if n.target in PRODUCTS and step.phase(n) is Phase.FORWARD
                and _is_wide(n) and _is_reduced(step, n)]
    found: list[Region | str] = []
    taken: set[fx.Node] = set()
    for product in sorted(products, key=lambda n: -n.meta["val"].numel()):
        region = _region(product, order, place)
        if isinstance(region, Region):
            read = (a for n in region.rules for a in n.all_input_nodes)
            if not taken.isdisjoint((*region.rules, *read, *region.moved)):
                continue  # part of a larger product's, or reads its results
            taken.update(region.rules)
        found.append(region)
    return found


def _left(product: fx.Node) -> fx.Node:
    return product.args[PRODUCTS[product.target]]


def _is_wide(product: fx.Node) -> bool:
    value, left = product.meta["val"], _left(product).meta["val"]
    return (all(type(s) is int for s in (*value.shape, *left.shape))
            and value.shape[1] > left.shape[1] and value.shape[0] > 1)


def _is_reduced(step: StepGraph, product: fx.Node) -> bool:
    """Whether forward makes something else of the rows than elementwise operands of a next product."""
    rows = product.meta["val"].shape[0]
    known, stack = {product: ROWS}, [product]
    while stack:
        for user in stack.pop().users:
            if user in known or user.target in PRODUCTS or step.phase(user) is not Phase.FORWARD:
                continue
            found = rule(user, known, rows)
            if found is None or width(user.meta["val"], rows) < product.meta["val"].shape[1]:
                return True
            known[user] = found.result
            stack.append(user)
    return False


def _region(product: fx.Node, order: list[fx.Node], place: Mapping[fx.Node, int]) -> Region | str:
    """Rules 2, 3 and 5."""
    left = _left(product)
    rows, narrow = left.meta["val"].shape
    first = rule(product, {left: ROWS}, rows)
    if first is None:
        return f"{op_name(product)} is not row by row"
    rules, known, results = {product: first}, {product: ROWS}, dict[fx.Node, None]()
    behind: set[fx.Node] = set()  # what needs a result
    for node in order[place[product] + 1:]:
        mine = [a for a in node.all_input_nodes if a in known]
        late = any(a in behind for a in node.all_input_nodes)
        found = rule(node, known, rows) if mine else None
        if found is not None and not late:
            rules[node] = found
            if found.result == SUM or node.target in PRODUCTS:
                results[node] = None
                behind.add(node)
            else:
                known[node] = found.result
        elif mine or late:
            for value in mine:
                if known[value] != ROWS or not 0 < width(value.meta["val"], rows) <= narrow:
                    what = "the step's result" if node.op == "output" else op_name(node)
                    return (f"{what} needs a result of the loss beside {op_name(value)}" if found else
                            f"{what} needs all rows of {op_name(value)} at once")
                results[value] = None
            behind.add(node)
    if not any(rules[n].result == SUM and width(n.meta["val"], 1) > narrow for n in results):
        return f"nothing sums up over the rows of {op_name(product)}"
    _draw_in(rules, left, rows, narrow)
    moved = _made_behind(rules, place, place[product])
    fixed = [n for n in moved if mutated_args(n) or is_random(n) or is_collective(n)]
    if fixed:
        return f"{op_name(fixed[0])} cannot run before the loss"
    if not all(n.meta["val"].is_contiguous() for n in results):
        return "a result is laid out in another order than its parts"
    ordered = sorted(rules, key=place.__getitem__)
    return Region(product, rows, {n: rules[n] for n in ordered}, tuple(results), tuple(moved))


def _draw_in(rules: dict[fx.Node, Rule], left: fx.Node, rows: int, narrow: int) -> None:
    """Add to `rules` what they read that is wide, or is made of such, and can be made in parts."""
    seen = {left: False}

    def draw(value: fx.Node, need: str) -> bool:
        if value not in seen:
            found = None if need == WHOLE or value.op == "placeholder" else rule(value, {}, rows)
            seen[value] = found is not None and found.result == need and any(
                [draw(*operand) for operand in found.needs.items()]
                + [width(value.meta["val"], rows) > narrow])
            if found is not None and seen[value]:
                rules[value] = found
        return value in rules

    for found in list(rules.values()):
        for operand in found.needs.items():
            if operand[0] not in rules:
                draw(*operand)


def _made_behind(rules: Mapping[fx.Node, Rule], place: Mapping[fx.Node, int], at: int) -> list[fx.Node]:
    """What `rules` need from outside that is made behind the position `at`."""
    found: set[fx.Node] = set()
    stack = [a for n in rules for a in n.all_input_nodes]
    while stack:
        node = stack.pop()
        if node not in found and node not in rules and place[node] > at:
            found.add(node)
            stack += node.all_input_nodes
    return sorted(found, key=place.__getitem__)


# ----------------------------------------------------------------------------- writing


def _call(step: StepGraph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = step.graph.call_function(target, args, kwargs)
    node.meta.update({k: like.meta[k] for k in ("stack_trace", "nn_module_stack") if k in like.meta})
    node.meta["val"] = target(*fx.map_arg(args, _fake), **fx.map_arg(kwargs, _fake))
    step.phases[node] = step.phase(like)
    return node


def _fake(node: fx.Node) -> Any:
    return node.meta["val"]


class _Chunks:
    """Writes a region in parts, in front of where its product stands."""

    def __init__(self, step: StepGraph, region: Region):
        self.step, self.region = step, region
        self.flat: dict[fx.Node, fx.Node] = {}  # operands from outside with one dimension of rows
        self.written: list[fx.Node] = []

    def write(self, parts: int) -> list[fx.Node]:
        step, region = self.step, self.region
        for node in region.moved:  # rule 5
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
                args = _sized(fx.map_arg(how.args, given.__getitem__), end - start)
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
        if short:
            term = self._call(node, aten._to_copy.default, term, dtype=torch.float32)
        return term if total is None else self._call(node, aten.add.Tensor, total, term)

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
        node = _call(self.step, like, target, *args, **kwargs)
        self.step.phases[node] = Phase.BACKWARD
        self.written.append(node)
        return node


def _sized(args: Iterable[Any], size: int) -> Iterator[Any]:
    """`args` with the number of rows where they stand for it."""
    for given in args:
        yield [size if s is SIZE else s for s in given] if isinstance(given, list) else given
