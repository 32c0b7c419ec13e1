"""Stretches of a step that the rows of a wide matrix flow through, each by itself: the loss layer.

1. A region begins at a product [N, V] of forward that is wider than the rows it is made of, and of
   which forward makes something else than operands of a next product.
2. It is what the rows flow through (`rowwise.rule`), up to products back to narrow rows and to sums over
   rows, one of them a gradient: as wide, or of the narrow rows (of frozen weights there is no other); and
   whatever else as wide is made for it and can be made in parts.
3. Nothing else may read a wide value of it (a step that returns its logits, say), nor may it depend on a
   result of it (a gradient scaled by the loss). Narrow rows may be read: they are results then.
4. What it reads that is made behind its beginning can run before: it writes and draws nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from .ordering import is_collective, is_random
from .rowwise import PRODUCTS, ROWS, SUM, WHOLE, Rule, rule, width
from .step_graph import Phase, StepGraph, mutated_args, op_name


@dataclass(frozen=True)
class Region:
    """What is computed in parts: `rules` in schedule order, from the product on; of its values
    `results` are read outside. `moved` is what it reads that is made behind the product."""

    product: fx.Node
    rows: int
    rules: dict[fx.Node, Rule]
    results: tuple[fx.Node, ...]
    moved: tuple[fx.Node, ...]


def regions(step: StepGraph) -> list[Region | str]:
    """The regions of `step`; for a product that has none the reason. The largest come first."""
    order = list(step.graph.nodes)
    place = {node: i for i, node in enumerate(order)}
    products = [n for n in order if n.target in PRODUCTS and step.phase(n) is Phase.FORWARD
                and _is_wide(n) and _is_reduced(step, n)]
    found: list[Region | str] = []
    taken: set[fx.Node] = set()
    for product in sorted(products, key=lambda n: -n.meta["val"].numel()):
        region = _region(step, product, order, place)
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


def _region(step: StepGraph, product: fx.Node, order: list[fx.Node], place: Mapping[fx.Node, int]) -> Region | str:
    """Rules 1 to 4."""
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
    if not any(width(n.meta["val"], 1) > narrow if rules[n].result == SUM else
               n.target in PRODUCTS and step.phase(n) is Phase.BACKWARD for n in results):
        return f"no gradient comes of the rows of {op_name(product)}"
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
