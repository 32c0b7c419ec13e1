"""Which results a piece stores, so that their operands can go.

Inductor computes a pointwise result again in every kernel that reads it, and keeps its operands until the
last. Of the gradient at a residual, ``where(x <= 0, 0, a + b)``, three tensors then live on in the place
of one, and the peak is above what the schedule says. A result is stored if all of this holds:

1. a library call stands between its first and its last reader (else one kernel can have them all);
2. Inductor does not store it anyway, for a library call that reads it or to hand it on;
3. operands that the piece makes and nothing else needs so late hold more bytes than the result.

A reduction of few elements Inductor writes out in the loop that reads it. One that reads a parameter, in
the loop of that parameter's update, would need neighbours that the loop has written: the update then comes
in a loop of its own, and what both need waits between as tensors. Such a reduction is stored.

And a reduction of what a tensor's old values make, where rounded new ones are written before it, would need those
in full precision: it comes in front of the write.

Memory: what rule 3 adds up dies, and the result takes its place; in the place of tensors like a parameter
are its small reductions. Numbers: the same operators on the same values, but another loop may be fused with
others, and so sums may be taken in another order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from ..compat.inductor import STORE, store
from ..compat.kernels import written_out
from ..costs import PRODUCTS, is_library
from ..ordering import fuses, is_random
from ..step_graph import aliased_args, mutated_args, nbytes


def store_between(graph: fx.Graph) -> None:
    """Store results of a piece by these rules, from the first on."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    calls = [i for node, i in place.items() if is_call(node)]
    for node in place:
        readers = _readers(node) if len(node.users) > 1 and _inlined(node) else ()  # rule 2
        at = [place[reader] for reader in readers]
        if not any(min(at) < call < max(at) for call in calls if at):  # rule 1
            continue
        freed = [o for o in _operands(node) if all(place[r] < max(at) for r in _readers(o, without=node))]
        if sum(nbytes(o.meta["val"]) for o in freed) > nbytes(node.meta["val"]):  # rule 3
            store(node)


def read_before_writes(graph: fx.Graph) -> None:
    """Sum up what a tensor's old values make in front of its write, where what is written cannot serve: rounded moments."""
    nodes = list(graph.nodes)
    place, moved = {node: i for i, node in enumerate(nodes)}, set()
    for write in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        into, written = write.args[:2]
        while _is_view(written):
            written = written.args[0]
        old = {into}
        for node in sorted(_computed_with(write), key=place.__getitem__):
            if node is not written and _passed_through(node) and not old.isdisjoint(node.all_input_nodes):
                old.add(node)
        readers = {reader for node in old - {into} for reader in _readers(node, without=written)}
        for reader in sorted(readers, key=place.__getitem__):
            between = nodes[place[write] + 1:place[reader] + 1]
            needed = {reader}
            for node in reversed(between):
                needed.update(node.all_input_nodes if node in needed else ())
            if write in needed or reader.op == "output" or any(mutated_args(n) or is_random(n) for n in between):
                continue
            for node in between:
                if node in needed - moved:
                    write.prepend(node)
                    moved.add(node)


def store_before_updates(graph: fx.Graph) -> None:
    """Store the reductions that would keep an update apart from the loop that computes it."""
    for update in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        for node in _computed_with(update):
            if _is_small(node) and update.args[0] in _computed_with(node):
                store(node)


def _is_small(node: fx.Node) -> bool:
    return (torch.Tag.reduction in getattr(node.target, "tags", ()) and isinstance(node.args[0], fx.Node)
            and written_out(node.args[0].meta["val"], node.meta["val"]))


def _computed_with(node: fx.Node) -> list[fx.Node]:
    """What the loop that computes `node` reads or computes on the way, small reductions too."""
    found, stack = {node: None}, [node]
    while stack:
        for operand in stack.pop().all_input_nodes:
            if operand not in found:
                found[operand] = None
                if _passed_through(operand) or _is_small(operand):
                    stack.append(operand)
    return list(found)[1:]


def is_call(node: fx.Node) -> bool:
    """Whether Inductor calls a library for `node`."""
    return is_library(node.target) or getattr(node.target, "__name__", "").split(".")[0] in PRODUCTS


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and not mutated_args(node) and bool(aliased_args(node))


def _inlined(node: fx.Node) -> bool:
    """Whether Inductor computes `node` where it is read (rule 2)."""
    value = node.meta.get("val")
    return (fuses(node) and isinstance(value, Tensor) and not aliased_args(node)
            and all(isinstance(n, int) for n in (*value.shape, *value.stride()))
            and not any(is_call(reader) or reader.target is STORE or reader.op == "output"
                        for reader in _readers(node, _is_view)))


def _passed_through(node: fx.Node) -> bool:
    return _is_view(node) or _inlined(node)


def _readers(node: fx.Node, through: Callable[[fx.Node], bool] = _passed_through,
             without: fx.Node | None = None) -> set[fx.Node]:
    """What reads `node`, seen through what is computed where it is read."""
    found, stack, seen = set(), [node], {without}
    while stack:
        for user in stack.pop().users:
            if user not in seen:
                seen.add(user)
                (stack.append if through(user) else found.add)(user)
    return found


def _operands(node: fx.Node) -> set[fx.Node]:
    """The buffers of the piece's own out of which `node` is computed."""
    found, stack, seen = set(), [node], set()
    while stack:
        for operand in stack.pop().all_input_nodes:
            if operand not in seen and operand.op == "call_function":
                seen.add(operand)
                (stack.append if _passed_through(operand) else found.add)(operand)
    return found
