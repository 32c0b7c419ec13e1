"""Losses whose gradient of each row depends on all rows: their logits are computed twice.

Preference and policy losses (DPO, PPO, GRPO) make a log-probability of each row of the logits, and the loss of all
of these. No row's gradient is known before, so that rows cannot go from forward on to their gradients by themselves
(`row_regions`). In two goes they can:

1. What nodes read of the rows of a wide product that need a result of theirs as well is computed again in front of
   the first of these, from the product on. Rows that are narrow are kept.
2. Only where both are regions then, and forward makes no product of the rows in the first: a feed-forward layer's rows
   are recomputation's. And not where a weight has been updated in between.

Before:  z = h·Wᵀ; p = log_softmax(z)[y]; loss = f(p); dp = f'(p); dz = dp·(1[y] − exp(log_softmax(z))); dh = dz·W
After:   z = h·Wᵀ; p = ..; loss; dp; z' = h·Wᵀ; dz = dp·(1[y] − exp(log_softmax(z'))); dh = dz·W

Memory: none by itself; in parts neither z nor z' is ever whole. Time: the product of forward once more. Numbers: the same.
"""

from __future__ import annotations

from torch import fx

from .row_regions import Region, is_reduced, is_wide, left_of, region_of, through
from .rowwise import PRODUCTS, width
from .step_graph import Phase, StepGraph, first_stale_read

MOST = 3  # times that a row's logits are computed again at most


def computed_twice(step: StepGraph) -> StepGraph:
    """Rules 1 and 2, in place."""
    for product in list(step.computing()):
        if product.target in PRODUCTS and step.phase(product) is Phase.FORWARD and is_wide(product) and is_reduced(
                step, product):
            _are_regions(step, product, MOST)
    return step


def _are_regions(step: StepGraph, product: fx.Node, times: int) -> bool:
    """Whether the rows of `product` are a region, or are such in several goes; then they are cut into these."""
    if isinstance(region_of(step, product), Region):
        return True
    rows, narrow = left_of(product).meta["val"].shape
    wide, readers = dict[fx.Node, None](), list[fx.Node]()
    for node, found, mine, late in through([product], rows):
        if found is not None and not late and node.target in PRODUCTS and step.phase(node) is Phase.FORWARD:
            return False
        if late and (read := [v for v in mine if width(v.meta["val"], rows) > narrow]):
            wide.update(dict.fromkeys(read))
            readers.append(node)
    if not readers or not times:
        return False
    again = _compute_again(step, product, wide, readers)
    if first_stale_read(step.graph) is None and isinstance(region_of(step, product), Region) and _are_regions(
            step, again[product], times - 1):
        useless = again
    else:
        for node, twin in again.items():
            twin.replace_all_uses_with(node)
        useless = again.values()
    for node in reversed(list(useless)):
        if not node.users:
            step.erase(node)
    return useless is again


def _compute_again(step: StepGraph, product: fx.Node, wide: dict[fx.Node, None],
                   readers: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Have `readers` read `wide` anew; what is computed a second time."""
    rows, narrow = left_of(product).meta["val"].shape
    needed, stack = {product}, list(wide)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += [a for a in node.all_input_nodes if width(a.meta.get("val"), rows) > narrow and product < a]
    again = dict[fx.Node, fx.Node]()
    for node in sorted(needed):
        with step.graph.inserting_before(max(node, readers[0])):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: again.get(n, n))
            again[node] = step.call(node, node.target, *args, **kwargs)
            step.phases[again[node]] = Phase.BACKWARD
    for reader in readers:
        for node in wide:
            reader.replace_input_with(node, again[node])
    return again
