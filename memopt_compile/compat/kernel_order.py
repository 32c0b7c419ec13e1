"""An order of one graph's kernels with a smaller estimated peak: what a peak does not need comes after it.

Inductor tries a few orders and takes the one with the smallest peak by its own estimate (`torch._inductor.memory`). Each goes by
what is best for the next kernel, or by what was computed when. In backward with activations computed again, a
layer's attention is then there beside its feed-forward layer's gradient, since both begin from one loop over its normalizations.

1. Kernels before the one at the peak that it does not need are put off until behind it, with all that reads them in between, if
   these hold more then than they have freed.
2. Kernels behind it that do not wait for it go before it, with all that they need, if they free more than they make.
3. Of the orders on the way that with the lowest peak is taken, and that is done again for the peak that is left, while none is higher.

What is computed is the same, and what has to wait for what is Inductor's word. Its parts are private, tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

from torch._inductor.scheduler import BaseSchedulerNode, SchedulerBuffer

ROUNDS = 50
MOST = 200  # kernels: a graph that is not cut into pieces may have many more


def past_peaks(nodes: list[BaseSchedulerNode], outputs: Container[str], worth: float = 0) -> list[BaseSchedulerNode]:
    """`nodes`, which Inductor has planned the memory of, in an order whose peak is lower by more than `worth` bytes, if there is
    one; `outputs` are the names of the graph's results."""
    lowest = first = here = _estimate(nodes, outputs)
    best, order, seen = nodes, nodes, {tuple(nodes)}
    for _ in range(ROUNDS if len(nodes) <= MOST else 0):
        changed = [(_estimate(each, outputs), each) for each in _apart(order, here[2], outputs) if tuple(each) not in seen]
        if not changed:
            break
        here, order = min(changed, key=lambda found: found[0][:2])
        if here[0] > lowest[0]:
            break
        seen.add(tuple(order))
        if here < lowest:
            best, lowest = order, here
    return best if lowest[0] + worth < first[0] else nodes


def _estimate(nodes: list[BaseSchedulerNode], outputs: Container[str]) -> tuple[int, int, int]:
    """Bytes of the peak, how often it is reached and first where. Unlike Inductor's estimate it has each result of
    a loop written over an operand that may be, of the same bytes."""
    place = {node: i for i, node in enumerate(nodes)}
    buffers = {b.get_name(): b for node in nodes for b in (*node.get_outputs(), *node.mpi_node.pred_buffers)}
    made = {b.get_name(): node for node in nodes for b in node.get_outputs()}
    dying: list[list[Any]] = [[] for _ in nodes]
    for name, buffer in buffers.items():
        if name not in outputs:
            dying[max(place[n] for n in buffer.mpi_buffer.succ_nodes or (made[name],))].append(buffer)
    live, lives = sum(b.mpi_buffer.size_free for name, b in buffers.items() if name not in made), []
    for node, free in zip(nodes, dying):
        results = [b.mpi_buffer.size_alloc for b in node.get_outputs()]
        over = [b.mpi_buffer.size_free for b in free if _is_written_over(b, node)]
        live += sum(results)
        lives.append(live - sum((Counter(results) & Counter(over)).elements()))
        live -= sum(b.mpi_buffer.size_free for b in free)
    peak = max(lives)
    return peak, lives.count(peak), lives.index(peak)


def _is_written_over(buffer: Any, by: BaseSchedulerNode) -> bool:
    inside = by.get_operation_names()
    return isinstance(buffer, SchedulerBuffer) and buffer.defining_op_name() not in inside and any(
        user.can_inplace and user.get_name() in inside for user in buffer.users)


def _apart(nodes: Sequence[BaseSchedulerNode], at: int, outputs: Container[str]) -> Iterator[list[BaseSchedulerNode]]:
    """Rule 1 and then rule 2 for the kernel with the number `at`: an order for each group of kernels that moves, with those of
    the same rule before."""
    peak, before = nodes[at], set(nodes[:at])
    needed, waiting = _reached(peak, lambda n: n.mpi_node.pred_nodes), _reached(peak, lambda n: n.mpi_node.succ_nodes)

    def readers(node: BaseSchedulerNode) -> Iterable[BaseSchedulerNode]:
        return node.mpi_node.succ_nodes & before

    def makers(node: BaseSchedulerNode) -> Iterable[BaseSchedulerNode]:
        return node.mpi_node.pred_nodes - before

    def order() -> list[BaseSchedulerNode]:
        return [*filter(before.__contains__, nodes), peak, *(n for n in nodes if n not in before and n is not peak)]

    for node in reversed(nodes[:at]):
        if node in before and node not in needed:
            group = _reached(node, readers)
            if _held(group, before, outputs) > 0:
                before -= group
                yield order()
    before = set(nodes[:at])
    for node in nodes[at + 1:]:
        if node not in before and node not in waiting:
            group = _reached(node, makers)
            if _held(group, before | group, outputs) < 0:
                before |= group
                yield order()


def _reached(node: BaseSchedulerNode, following: Callable[[BaseSchedulerNode], Iterable[BaseSchedulerNode]]) -> set[BaseSchedulerNode]:
    """`node`, what follows it, and so on."""
    found, left = {node}, [node]
    while left:
        new = set(following(left.pop())) - found
        found |= new
        left += new
    return found


def _held(group: set[BaseSchedulerNode], before: set[BaseSchedulerNode], outputs: Container[str]) -> int:
    """Bytes that `group` makes, less what is free behind `before` because of it."""
    made = [b for node in group for b in node.get_outputs()]
    touched = {b.get_name(): b for b in (*made, *(b for node in group for b in node.mpi_node.pred_buffers))}
    return sum(b.mpi_buffer.size_alloc for b in made) - sum(
        b.mpi_buffer.size_free for name, b in touched.items() if name not in outputs and b.mpi_buffer.succ_nodes <= before)
