"""Stretches of a step that the rows of a wide matrix flow through, each by itself: the loss layer.

1. A region begins at a product [N, V] of forward that is wider than the rows it is made of, and of
   which forward makes something else than operands of a next product.
2. It is what the rows flow through (`rowwise.rule`), up to products back to narrow rows and to sums over
   rows, one of them a gradient: as wide, or of the narrow rows (of frozen weights there is no other); or up to
   narrow rows alone (log-probabilities). Whatever else as wide is made for it and can be made in parts is of
   it; if that is one more such product (a teacher's logits), its rows are followed as well.
3. Nothing else may read a wide value of it (a step that returns its logits, say), nor may it depend on a
   result of it (a gradient scaled by the loss). Narrow rows may be read: they are results then.
4. What it reads that is made behind its last such product can run before that, and what needs its results before can
   run behind: it writes and draws nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from .ordering import is_collective, is_random
from .rowwise import PRODUCTS, ROWS, SUM, WHOLE, Rule, rule, width
from .step_graph import Phase, StepGraph, mutated_args, op_name, source_line


@dataclass(frozen=True)
class Region:
    """What is computed in parts: `rules` in schedule order; of its values `results` are read outside. It is computed
    where its last `product` stands: `moved` is what it reads that is made behind that, `late` what needs its results
    before that."""

    product: fx.Node
    rows: int
    rules: dict[fx.Node, Rule]
    results: tuple[fx.Node, ...]
    moved: tuple[fx.Node, ...]
    late: tuple[fx.Node, ...]


def regions(step: StepGraph) -> dict[fx.Node, Region | str]:
    """The region that begins at each such product of `step`, or the reason why there is none. The largest come first;
    what is part of one is not there again."""
    wide = [n for n in step.computing() if n.target in PRODUCTS and is_wide(n)]
    first = [n for n in wide if step.phase(n) is Phase.FORWARD]
    done = {(n.target, n.args) for n in first}
    again = [n for n in wide if step.phase(n) is Phase.BACKWARD and (n.target, n.args) in done]
    found = dict[fx.Node, Region | str]()
    taken: set[fx.Node] = set()
    for product in sorted([n for n in first if is_reduced(step, n)] + again, key=lambda n: -n.meta["val"].numel()):
        if product not in taken:
            found[product] = region_of(step, product)
            taken.update(getattr(found[product], "rules", ()))
    return found


def left_of(product: fx.Node) -> fx.Node:
    return product.args[PRODUCTS[product.target]]


def is_wide(product: fx.Node) -> bool:
    value, left = product.meta["val"], left_of(product).meta["val"]
    return (all(type(s) is int for s in (*value.shape, *left.shape))
            and value.shape[1] > left.shape[1] and value.shape[0] > 1)


def is_reduced(step: StepGraph, product: fx.Node) -> bool:
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


def through(products: Iterable[fx.Node], rows: int) -> Iterator[tuple[fx.Node, Rule | None, list[fx.Node], bool]]:
    """What the rows of `products` reach, in schedule order: each node, its rule, the row-wise values that it reads
    and whether it needs a result of them as well. What comes of such a product computed again is not followed."""
    known = dict.fromkeys(products, ROWS)
    begins = {(n.target, n.args) for n in known}
    behind: set[fx.Node] = set()  # what needs a result
    again: set[fx.Node] = set()
    reached = {user for n in known for user in n.users}
    node = min(known)
    while (node := node.next).op != "root":
        twice = node.target in PRODUCTS and node not in known and (node.target, node.args) in begins
        if not twice and node not in reached:
            continue
        reached.update(node.users)
        given = node.all_input_nodes
        if twice or not again.isdisjoint(given):
            again.add(node)
        mine = [a for a in given if a in known]
        late = not behind.isdisjoint(given)
        found = rule(node, known, rows) if mine and node not in again else None
        if mine or late:
            yield node, found, mine, late
            if found is None or late or found.result == SUM or node.target in PRODUCTS:
                behind.add(node)
            else:
                known[node] = found.result


def region_of(step: StepGraph, product: fx.Node) -> Region | str:
    """The region that begins at `product`, by rules 2 to 4, or why there is none."""
    begins = [product]
    found = region = _region(step, begins)
    while isinstance(region, Region):
        read = (a for n, how in region.rules.items() for a, need in how.needs.items() if need == ROWS)
        others = dict.fromkeys(a for a in read if a.target in PRODUCTS and is_wide(a) and a not in region.rules)
        if not others:
            break
        begins += others
        region = _region(step, begins)
        found = region if isinstance(region, Region) else found
    return found


def _region(step: StepGraph, begins: list[fx.Node]) -> Region | str:
    """What the rows of these products flow through."""
    order = list(step.graph.nodes)
    place = {node: i for i, node in enumerate(order)}
    left, rows, last = {left_of(n): ROWS for n in begins}, begins[0].meta["val"].shape[0], max(begins)
    narrow = max(n.meta["val"].shape[1] for n in left)
    rules, results = dict[fx.Node, Rule](), dict[fx.Node, None]()
    for product in begins:
        if (first := rule(product, left, rows)) is None:
            return f"{_named(product)} is not row by row"
        rules[product] = first
    for node, found, mine, late in through(begins, rows):
        if node in begins:
            return f"{_named(node)} needs rows of {op_name(mine[0] if mine else last)}"
        if found is not None and not late:
            rules[node] = found
            if found.result == SUM or node.target in PRODUCTS:
                results[node] = None
            continue
        for value in mine:
            if rules[value].result != ROWS or not 0 < width(value.meta["val"], rows) <= narrow:
                what = "the step's result" if node.op == "output" else _named(node)
                return (f"{what} needs a result of the loss beside {op_name(value)}" if found else
                        f"{what} needs all rows of {op_name(value)} at once")
            results[value] = None
    if any(n.target in PRODUCTS for n in results) and not any(
            width(n.meta["val"], 1) > narrow if rules[n].result == SUM else
            n.target in PRODUCTS and step.phase(n) is Phase.BACKWARD for n in results):
        return f"no gradient comes of the rows of {_named(begins[0])}"
    _draw_in(rules, begins, rows, narrow)
    moved, late = _made_behind(rules, place, place[last]), _needing(results, rules, last)
    if torn := [n for n in moved if any(a in rules and last < a for a in n.all_input_nodes)]:
        return f"{_named(torn[0])} reads all of what the loss is made of row by row"
    between = order[place[late[0]]:place[last]] if late else []
    fixed = [n for n in (*moved, *between) if mutated_args(n) or is_random(n) or is_collective(n)]
    if fixed:
        return f"{_named(fixed[0])} has its place in the step, between what the loss is made of"
    if not all(n.meta["val"].is_contiguous() for n in results):
        return "a result is laid out in another order than its parts"
    ordered = sorted(rules, key=place.__getitem__)
    return Region(last, rows, {n: rules[n] for n in ordered}, tuple(results), tuple(moved), tuple(late))


def _named(node: fx.Node) -> str:
    line = source_line(node)
    return op_name(node) + (f" ({line})" if line else "")


def _draw_in(rules: dict[fx.Node, Rule], begins: Iterable[fx.Node], rows: int, narrow: int) -> None:
    """Add to `rules` what they read that is wide, or is made of such, and can be made in parts: but nothing that comes
    of the same product elsewhere."""
    seen: dict[fx.Node, Rule | None] = {left_of(n): None for n in begins}
    same = {(n.target, n.args) for n in begins}
    elsewhere: set[fx.Node] = set()

    def how(value: fx.Node, need: str) -> Rule | None:
        if value not in seen:
            found = None if need == WHOLE or value.op == "placeholder" else rule(value, {}, rows)
            drawn = [how(*operand) for operand in found.needs.items()] if found else []
            if value.target in PRODUCTS and (value.target, value.args) in same or found and not elsewhere.isdisjoint(found.needs):
                elsewhere.add(value)
            wide = any(drawn) or width(value.meta["val"], rows) > narrow
            seen[value] = found if found is not None and found.result == need and wide and value not in elsewhere else None
        return seen[value]

    readers = list(rules.values())
    while readers:  # what is read by nothing that is drawn in stays
        for operand in readers.pop().needs.items():
            if operand[0] not in rules and (found := how(*operand)) is not None:
                rules[operand[0]] = found
                readers.append(found)


def _needing(results: Iterable[fx.Node], rules: Mapping[fx.Node, Rule], last: fx.Node) -> list[fx.Node]:
    """What needs `results` and runs before `last`."""
    found, stack = set[fx.Node](), list(results)
    while stack:
        more = [n for n in stack.pop().users if n not in rules and n not in found and n < last]
        found.update(more)
        stack += more
    return sorted(found)


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
