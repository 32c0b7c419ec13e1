"""Complete a loop over micro-batches of which only three iterations were traced.

The trace (`capture.iterations`) holds iterations 0, 1 and 2, each begun by markers, and behind 1 and 2
nodes that read what Python holds there, so that neither has lost what nobody read of it. With
the nodes of 1 and 2 paired in order, what an iteration reads from outside itself is one of

1. the same value in both: an invariant of the loop, read by every copy;
2. in iteration 2 a value of iteration 1: carried, so that a copy reads it of the one before;
3. a chunk, by its marker: a copy cuts its own.

Copies of iteration 1 for the chunks from 3 on go behind iteration 2, and what reads iteration 2
from behind reads the last of them. Anything else (another operator, another constant, a value that
outlives the next iteration) means that the iterations differ, and the loop has to be traced whole.

Before:  g0 = grad(x0); g1 = g0 + grad(x1); g2 = g1 + grad(x2); end; update(g2)
After:   .. g2 = g1 + grad(x2); g3 = g2 + grad(x3); g4 = g3 + grad(x4); update(g4)
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from .compat.trace import pytree, real_tensors
from .data_sizes import makes_sizes
from .step_graph import OPERATOR

MARK = torch.ops.memopt.micro_batch.default
STATE = torch.ops.memopt.loop_state.default
SLICE = torch.ops.aten.slice.Tensor


class Unlike(Exception):
    """The traced iterations of a loop are not copies of each other."""


def complete(graph: fx.Graph) -> int:
    """Put the iterations that were not traced into `graph` and take the markers out; returns for
    how many loops.

    Raises:
        Unlike: a loop cannot be completed; the graph is then of no use.
    """
    loops: dict[int, dict[int, fx.Node]] = {}  # by loop and iteration, its first marker
    for mark in graph.find_nodes(op="call_function", target=MARK):
        _, loop, index, _ = mark.args
        loops.setdefault(loop, {}).setdefault(index, mark)
    states = graph.find_nodes(op="call_function", target=STATE)
    ends = [state for state in states if state.args[2] == 3]
    for end in ends:
        _complete_one(loops.get(end.args[1], {}), end)
    for state in states:
        graph.erase_node(state)
    for mark in graph.find_nodes(op="call_function", target=MARK):
        mark.replace_all_uses_with(mark.args[0])
        graph.erase_node(mark)
    graph.eliminate_dead_code()
    return len(ends)


def _complete_one(first: dict[int, fx.Node], end: fx.Node) -> None:
    if sorted(first) != [0, 1, 2]:
        raise Unlike("an iteration reads no chunk")
    nodes = list(end.graph.nodes)
    at = {node: i for i, node in enumerate(nodes)}
    one, two = nodes[at[first[1]]:at[first[2]]], nodes[at[first[2]]:at[end] + 1]
    if len(one) != len(two):
        raise Unlike(f"one iteration has {len(one)} operators and the next {len(two)}")
    twin = dict(zip(one, two))
    carried = _carried(twin)
    for node in one:
        late = next((u for u in node.users if at[u] > at[end]), None)
        if late is not None:
            raise Unlike(f"{late.name} reads {node.name}, which is older than an iteration")
    latest = twin
    for index in range(3, first[0].args[3]):
        latest = _copy(one, latest, carried, index, where=end)
    for node, last in latest.items():
        twin[node].replace_all_uses_with(
            last, delete_user_cb=lambda user: at.get(user, -1) > at[end])


def _carried(twin: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """What the first of two iterations reads from outside -> what the second reads in its place."""
    carried: dict[fx.Node, fx.Node] = {}
    back: dict[fx.Node, fx.Node] = {}
    for a, b in twin.items():
        if a.op == b.op == "get_attr" and _same_constant(a, b):
            continue
        if not _repeatable(a) or a.target != b.target:
            raise Unlike(f"{a.name} is {a.target}, where {b.name} is {b.target}")
        if a.target is MARK:
            if not (_is_chunk(a) and _is_chunk(b) and a.args[0].args[0] is b.args[0].args[0]):
                raise Unlike(f"{a.args[0].name} and {b.args[0].name} are not chunks of one tensor")
            continue
        (left, form), (right, other) = (pytree.tree_flatten(
            (list(n.args[:1] if n.target is STATE else n.args), dict(n.kwargs))) for n in (a, b))
        if form != other:
            raise Unlike(f"{a.name} and {b.name} have other arguments")
        for x, y in zip(left, right):
            if not (isinstance(x, fx.Node) and isinstance(y, fx.Node)):
                if type(x) is not type(y) or x != y:
                    raise Unlike(f"{a.name} has {x} where {b.name} has {y}")
            elif x in twin:
                if y is not twin[x]:
                    raise Unlike(f"{a.name} and {b.name} read different values")
            elif x is not y and y not in twin:
                raise Unlike(f"{b.name} reads {y.name}, which is older than an iteration")
            elif carried.setdefault(x, y) is not y or back.setdefault(y, x) is not x:
                raise Unlike(f"{a.name} and {b.name} read values that change places")
    return carried


def _same_constant(a: fx.Node, b: fx.Node) -> bool:
    x, y = (getattr(n.graph.owning_module, n.target, None) for n in (a, b))
    with real_tensors():  # tracing is still going on
        return x is y is not None or (
            type(x) is type(y) is Tensor and x.dtype == y.dtype and x.device == y.device
            and x.stride() == y.stride() and torch.equal(x, y))


def _repeatable(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, OPERATOR) and not (node.target._schema.is_mutable or makes_sizes(node))


def _is_chunk(mark: fx.Node) -> bool:
    """Whether the marker stands on the chunk of its iteration along the first dimension."""
    chunk, _, index, _ = mark.args
    rows = chunk.meta["val"].shape[0] if chunk.target is SLICE else 0
    return rows > 0 and chunk.args[1:3] == (0, index * rows) and len(chunk.args) < 5


def _copy(one: list[fx.Node], before: dict[fx.Node, fx.Node], carried: dict[fx.Node, fx.Node],
          index: int, where: fx.Node) -> dict[fx.Node, fx.Node]:
    """Iteration `index` ahead of `where`, by the nodes of `one`; `before` is the one before it."""
    copies: dict[fx.Node, fx.Node] = {}

    def operand(node: fx.Node) -> fx.Node:
        return copies.get(node) or before.get(carried.get(node, node), node)

    with where.graph.inserting_before(where):
        for node in one:
            if node.target is STATE:
                continue
            if node.target is MARK:
                copies[node] = _chunk(node.args[0], index)
            else:
                copies[node] = where.graph.node_copy(node, operand)
    return copies


def _chunk(like: fx.Node, index: int) -> fx.Node:
    base, rows = like.args[0], like.meta["val"].shape[0]
    chunk = like.graph.call_function(SLICE, (base, 0, index * rows, (index + 1) * rows))
    chunk.meta.update(like.meta, val=base.meta["val"][index * rows:(index + 1) * rows])
    return chunk
