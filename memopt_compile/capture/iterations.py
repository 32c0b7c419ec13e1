"""A loop over `memopt.micro_batches` is traced for three of its iterations, not for all.

Dynamo unrolls a ``for`` statement, so that sixteen micro-batches cost sixteen traces of the model.
But tracing is a function of what Python can see: if that is the same at the start of the third and
of the fourth iteration, every later one would be traced as the third was. Then the trace leaves
the loop there, and `loops.complete` puts the other iterations into the graph.

Left unrolled are loops in which Python remembers something besides tensors (a counter, a list that
grows, ``enumerate``), loops in generators, chunks of different sizes, and up to three chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..compat import loop as compat_loop
from ..quantization.parameters import LowPrecisionTensor, register

TRACED = 3  # the first, and two that are compared


@torch.library.custom_op("memopt::micro_batch", mutates_args=())
def micro_batch(chunk: Tensor, loop: int, index: int, n: int) -> Tensor:
    """A copy of `chunk`. Marks where iteration `index` of `n` begins in the `loop`-th loop."""
    return chunk.new_empty_strided(chunk.shape, chunk.stride()).copy_(chunk)


@torch.library.custom_op("memopt::loop_state", mutates_args=())
def loop_state(tensors: list[Tensor], loop: int, index: int) -> Tensor:
    """Nothing of use. Marks the end of iteration `index` - 1 in the `loop`-th loop, and keeps in
    the graph all that Python could still read of it."""
    return torch.empty(0)


micro_batch.register_fake(
    lambda chunk, loop, index, n: chunk.new_empty_strided(chunk.shape, chunk.stride()))
loop_state.register_fake(lambda tensors, loop, index: torch.empty(0))
register(torch.ops.memopt.loop_state, lambda func, tensors, *place: func(
    [part for t in tensors for part in (t.parts if isinstance(t, LowPrecisionTensor) else [t])], *place))
torch.fx.node.has_side_effect(torch.ops.memopt.loop_state.default)


@dataclass
class Loop:
    """One call of `memopt.micro_batches` in the frame being traced, and the ``for`` statement that
    runs over it first. `shortened` once the trace has left iterations out."""

    chunks: list[Any]
    iterator: Any = None
    statement: Any = None
    third: Any = None
    shortened: bool = False


def next_item(loops: Sequence[Loop], original: Callable, iterator: Any, tx: Any) -> Any:
    """The next item of a list iterator: of chunks in a ``for`` statement, marked and cut short."""
    loop = next((o for o in loops if o.chunks is iterator.items), None)
    statement = compat_loop.for_statement(tx, iterator)
    if loop is None or statement is None:
        return original(iterator, tx)
    if loop.iterator is None and _equal_and_many(loop.chunks):
        loop.iterator, loop.statement = iterator, statement
    if (loop.iterator is not iterator or loop.statement != statement
            or iterator.index >= len(loop.chunks)):
        return original(iterator, tx)
    index = iterator.index
    if index in (TRACED - 1, TRACED):
        state, tensors = compat_loop.python_state(tx, but=iterator)
        if index < TRACED or state == loop.third:
            values = compat.tuple_variable(
                [loop.chunks[0].items[0], *(_rows(tx, tensor) for tensor in tensors)])
            _call(tx, torch.ops.memopt.loop_state.default, values, loops.index(loop), index)
        if index < TRACED:
            loop.third = state
        elif state == loop.third:
            loop.shortened, iterator.index = True, len(loop.chunks)
            return original(iterator, tx)
    # In the list too, so that a chunk stays the same object whichever way it is reached.
    loop.chunks[index] = compat.map_tensors(tx, loop.chunks[index], lambda chunk: _call(
        tx, torch.ops.memopt.micro_batch.default, chunk, loops.index(loop), index,
        len(loop.chunks)))
    return original(iterator, tx)


def _call(tx: Any, marker: Any, values: Any, *place: int) -> Any:
    build = compat.VariableTracker.build
    return build(tx, marker).call_function(tx, [values, *(build(tx, n) for n in place)], {})


def _rows(tx: Any, tensor: Any) -> Any:
    """What this rank has of a DTensor: the marker takes no mixture of them and other tensors."""
    if not hasattr(compat.fake_value(tensor), "to_local"):
        return tensor
    with compat.traced_without_grad(tx):  # then it is the tensor inside, and no view of it
        return tensor.call_method(tx, "to_local", [], {})


def _equal_and_many(chunks: list[Any]) -> bool:
    """Whether leaving some out is possible: more than are traced, alike, fixed in size, dense."""
    if len(chunks) <= TRACED:
        return False
    fakes = [[compat.fake_value(t) for t in chunk.items] for chunk in chunks]
    return all(
        t.shape == like.shape and not t.requires_grad
        and all(isinstance(n, int) for n in t.shape)
        and torch.ops.aten.is_non_overlapping_and_dense(t)
        for chunk in fakes for t, like in zip(chunk, fakes[0], strict=True))
