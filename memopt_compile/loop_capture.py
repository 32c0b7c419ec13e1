"""A loop over `memopt.micro_batches` is traced for four of its iterations, not for all.

Dynamo unrolls a ``for`` statement, so that sixteen micro-batches cost sixteen traces of the model.
But tracing is a function of what Python can see: if that is the same at the start of the third and
of the fourth iteration, every later one would be traced as the third was. Then the trace goes from
there to the last chunk at once, and `loops.complete` puts the iterations between into the graph.

Left unrolled are loops in which Python remembers something besides tensors (a counter, a list that
grows, ``enumerate``), chunks of different sizes, and up to four chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import compat, compat_loop

TRACED = 4  # the first, two that are compared, the last


@torch.library.custom_op("memopt::micro_batch", mutates_args=())
def micro_batch(chunk: Tensor, loop: int, index: int, n: int) -> Tensor:
    """A copy of `chunk`. Marks where iteration `index` of `n` begins in the `loop`-th loop."""
    return chunk.new_empty_strided(chunk.shape, chunk.stride()).copy_(chunk)


micro_batch.register_fake(
    lambda chunk, loop, index, n: chunk.new_empty_strided(chunk.shape, chunk.stride()))


@dataclass
class Loop:
    """One call of `memopt.micro_batches` in the frame being traced. `shortened` once the trace
    has left iterations out."""

    chunks: list[Any]
    iterator: Any = None
    third: Any = None
    shortened: bool = False


def next_item(loops: Sequence[Loop], original: Callable, iterator: Any, tx: Any) -> Any:
    """The next item of a list iterator: of chunks in a ``for`` statement, marked and cut short."""
    loop = next((o for o in loops if o.chunks is iterator.items), None)
    if loop is None or not compat_loop.for_loop_asks(tx, iterator):
        return original(iterator, tx)
    if loop.iterator is None and _equal_and_many(loop.chunks):
        loop.iterator = iterator
    if loop.iterator is not iterator or iterator.index >= len(loop.chunks):
        return original(iterator, tx)
    if iterator.index == TRACED - 2:
        loop.third = compat_loop.python_state(tx, but=iterator)
    elif iterator.index == TRACED - 1 and not loop.shortened:
        if compat_loop.python_state(tx, but=iterator) == loop.third:
            iterator.index, loop.shortened = len(loop.chunks) - 1, True
    place = [loops.index(loop), iterator.index, len(loop.chunks)]
    build = compat.VariableTracker.build
    return compat.map_tensors(tx, original(iterator, tx), lambda chunk: build(
        tx, torch.ops.memopt.micro_batch.default).call_function(
            tx, [chunk, *(build(tx, number) for number in place)], {}))


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
