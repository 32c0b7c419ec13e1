"""Which results a piece stores, so that their operands can go.

Inductor computes a pointwise result again in every kernel that reads it, and keeps its operands until the
last. Of the gradient at a residual, ``where(x <= 0, 0, a + b)``, three tensors then live on in the place
of one, and the peak is above what the schedule says. A result is stored if all of this holds:

1. a library call stands between its first and its last reader (else one kernel can have them all);
2. Inductor does not store it anyway, for a library call that reads it or to hand it on;
3. operands that the piece makes and nothing else needs so late hold more bytes than the result.

Memory: what rule 3 adds up dies, and the result takes its place. Numbers: the same operators on the same
values, but another loop may be fused with others, and so sums may be taken in another order.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, fx

from .compat_inductor import STORE, store
from .costs import is_library
from .ordering import fuses
from .step_graph import aliased_args, mutated_args, nbytes

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")


def store_between(graph: fx.Graph) -> None:
    """Store results of a piece by these rules, from the first on."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    calls = [i for node, i in place.items() if _is_call(node)]
    for node in place:
        readers = _readers(node) if len(node.users) > 1 and _inlined(node) else ()  # rule 2
        at = [place[reader] for reader in readers]
        if not any(min(at) < call < max(at) for call in calls if at):  # rule 1
            continue
        freed = [o for o in _operands(node) if all(place[r] < max(at) for r in _readers(o, without=node))]
        if sum(nbytes(o.meta["val"]) for o in freed) > nbytes(node.meta["val"]):  # rule 3
            store(node)


def _is_call(node: fx.Node) -> bool:
    return is_library(node.target) or getattr(node.target, "__name__", "").split(".")[0] in PRODUCTS


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and not mutated_args(node) and bool(aliased_args(node))


def _inlined(node: fx.Node) -> bool:
    """Whether Inductor computes `node` where it is read (rule 2)."""
    value = node.meta.get("val")
    return (fuses(node) and isinstance(value, Tensor) and not aliased_args(node)
            and all(isinstance(n, int) for n in (*value.shape, *value.stride()))
            and not any(_is_call(reader) or reader.target is STORE or reader.op == "output"
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
