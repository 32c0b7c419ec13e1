"""How Inductor orders and groups the kernels of one graph: what memopt has it do otherwise, and what it will do.

All are private parts of Inductor, tried on torch 2.11 and 2.13, and changed while a graph of memopt's is
compiled only. Its cache on disk does not know of them, nor of the processor: `cache_tag` tells it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._inductor import config, ir, lowering, memory
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.graph import GraphLowering
from torch._inductor.loop_body import LoopBody
from torch._inductor.scheduler import (
    BaseSchedulerNode,
    NodeUser,
    OutputNode,
    Scheduler,
    SchedulerBuffer,
    SchedulerNode,
)
from torch._inductor.virtualized import V

from . import kernel_order

SMALL = 64  # what waits to be freed is worth a kernel from this part of the bytes of a graph's inputs on


@contextlib.contextmanager
def as_memopt_wants() -> Iterator[None]:
    """Within it, Inductor makes the kernels of graphs that have nothing to do with another compilation."""
    tag = f"{torch.compiler.config.cache_key_tag} memopt {cache_tag()}"
    with (_read_before_written(), _freed_between(), _freed_before_needed(), _made_when_needed(), _written_over(),
          _written_by_another_name(), _counted_once(), _past_peaks(), torch.compiler.config.patch(cache_key_tag=tag)):
        yield


def cache_tag() -> str:
    """What else decides what Inductor makes of a graph, so that what it has kept on disk by another is not
    taken: the modules that change it, by their digest, and how wide the vectors of this processor are. Its
    C++ has that width in it, and gives wrong numbers where another one is compiled for (a cache that machines
    share, or ``ATEN_CPU_CAPABILITY``)."""
    return f"{_digest()} {torch.backends.cpu.get_cpu_capability()}"


@functools.cache
def _digest() -> str:
    here = Path(__file__)
    texts = [here.with_name(name).read_bytes() for name in ("kernels.py", "inductor.py", "kernel_order.py")]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]


def writing_into(given: Sequence[int]) -> contextlib.AbstractContextManager:
    """The graph's inputs of these numbers are buffers that may be written over, as AOTAutograd's donated ones are in backward."""
    placeholder = GraphLowering.placeholder

    def donated(self: GraphLowering, *call: Any) -> Any:
        backward, self.is_backward, self.bw_donated_idxs = self.is_backward, True, list(given)
        try:
            return placeholder(self, *call)
        finally:
            self.is_backward = backward

    return mock.patch.object(GraphLowering, "placeholder", donated) if given else contextlib.nullcontext()


def _read_before_written() -> contextlib.AbstractContextManager:
    """Values that read a buffer are computed before an operator of ours writes to it.

    Inductor puts such an operator into its order first, and then makes buffers of what has read its
    operands: these read what it has written (a gradient by parameters that were updated already).
    """
    create = ir.FallbackKernel.create.__func__

    def made(cls: type, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        for given, value in zip(getattr(getattr(kernel, "_schema", None), "arguments", ()), args):
            if given.alias_info is not None and given.alias_info.is_write:
                for written in value if isinstance(value, list | tuple) else [value]:
                    V.graph.mark_buffer_mutated(written.get_name())
        return create(cls, kernel, *args, **kwargs)

    return mock.patch.object(ir.FallbackKernel, "create", classmethod(made))


def _freed_between() -> contextlib.AbstractContextManager:
    """A C++ function ends where buffers can be freed.

    Inductor puts all loops between two calls of a library into one function, and so holds the buffers of
    all of them until it is over.
    """
    full = CppScheduling.ready_to_flush

    def ready(self: CppScheduling) -> bool:
        return full(self) or _waiting_bytes(self.scheduler) > _given_bytes() / SMALL

    return mock.patch.object(CppScheduling, "ready_to_flush", ready)


def _freed_before_needed() -> contextlib.AbstractContextManager:
    """Loops are not joined by their outer ones where what the first has could be freed before the second runs.

    In a step that is forward and backward of one softmax: as one loop they hold what only forward reads beside
    the gradient. In two graphs, as `torch.compile` has them, these take turns. What joining makes local to the
    loops counts in its favour.
    """
    may_join = CppScheduling.can_fuse_vertical_outer_loop

    def joined(self: CppScheduling, first: BaseSchedulerNode, second: BaseSchedulerNode) -> bool:
        if not may_join(self, first, second):
            return False
        buffers = first.scheduler.name_to_buf
        names = {dep.name for dep in first.read_writes.reads} | {b.get_name() for b in first.get_outputs()}
        here, there = first.get_operation_names(), second.get_operation_names()
        freed = made = local = 0.0
        for buffer in (buffers[name] for name in names if name in buffers):
            readers = [u for u in buffer.users if not _only_waits(u, buffer.get_name()) and not _is_gone(u)
                       and u.get_name() not in here]
            inside = [user.get_name() in there for user in readers]
            if buffer.defining_op_name() in here and all(inside):
                local += _bytes(buffer.node)
            elif not any(inside) and not any(_comes_after(user, there) for user in readers):
                freed += _bytes(buffer.node)
        for buffer in second.get_outputs():
            if not buffer.get_mutations() and any(user.get_name() not in there for user in buffer.users):
                made += _bytes(buffer.node)
        return min(freed, made) <= max(local, _given_bytes() / SMALL)

    return mock.patch.object(CppScheduling, "can_fuse_vertical_outer_loop", joined)


def _made_when_needed() -> contextlib.AbstractContextManager:
    """Loops are not joined where that holds a result or an operand while others run.

    What is computed again in backward reads what forward read: as one loop with forward's, it would be kept
    after all. So would what backward computes from a result of forward, as one loop with that. Inductor has a limit for
    the first, of 64 loops and calls between the two; layers can have fewer.
    """
    distant, vertical = Scheduler.are_long_distant_nodes, InductorChoices.can_fuse_vertical

    def held(scheduler: Scheduler, first: BaseSchedulerNode, second: BaseSchedulerNode) -> bool:
        return _held_bytes(scheduler, first, second) > _given_bytes() / SMALL

    def apart(self: Scheduler, first: BaseSchedulerNode, second: BaseSchedulerNode) -> bool:
        return distant(self, first, second) or held(self, first, second)

    def joined(scheduler: Scheduler, first: BaseSchedulerNode, second: BaseSchedulerNode, shared: int) -> bool:
        return vertical(scheduler, first, second, shared) and not held(scheduler, first, second)

    both = contextlib.ExitStack()
    both.enter_context(mock.patch.object(Scheduler, "are_long_distant_nodes", apart))
    both.enter_context(mock.patch.object(InductorChoices, "can_fuse_vertical", staticmethod(joined)))
    return both


def _held_bytes(scheduler: Scheduler, first: BaseSchedulerNode, second: BaseSchedulerNode) -> float:
    """Bytes that are held, over what lies between two loops, if they become one: at the place of the earlier, for
    whose first reader the later's operands then come sooner, or, if nothing needs that one before, of the later."""
    early, late = sorted((first, second), key=lambda node: node.min_order)
    if late.min_order - early.max_order < 2:
        return 0
    both = early.get_operation_names() | late.get_operation_names()

    def uses(buffer: SchedulerBuffer) -> list[float]:
        """When others than the two read it."""
        return [math.inf if isinstance(user.node, OutputNode) else user.node.min_order for user in buffer.users
                if user.get_name() not in both and not _only_waits(user, buffer.get_name()) and not _is_gone(user)]

    def made(node: BaseSchedulerNode) -> list[SchedulerBuffer]:
        return [b for b in node.get_outputs() if not b.get_mutations() and uses(b)]

    def read(node: BaseSchedulerNode) -> set[str]:
        """Buffers of the graph, not of the caller."""
        return {dep.name for dep in node.read_writes.reads} & scheduler.name_to_buf.keys()

    def ended(names: set[str], bound: float) -> list[SchedulerBuffer]:
        """Those of `names` that others made and that nothing else reads from `bound` on."""
        return [b for b in map(scheduler.name_to_buf.get, names)
                if b.defining_op_name() not in both and all(when < bound for when in uses(b))]

    by_early, by_late = read(early), read(late)
    inside = _total(b for b in early.get_outputs() if not b.get_mutations() and not uses(b))  # what is then never made
    there = [b for b in ended(by_late - by_early, late.min_order) if b.defining_op.min_order < early.min_order]
    at_early = _total(made(late)) - _total(there) - inside
    needed = min((when for buffer in early.get_outputs() for when in uses(buffer)), default=math.inf)
    if needed < late.min_order:
        operands = [scheduler.name_to_buf[name] for name in by_late]
        shared = _total(b for b in operands if b.get_name() in by_early)
        sooner = _total(b for b in operands if b.defining_op.min_order > needed)
        return at_early + (sooner if shared > _given_bytes() / SMALL else 0)
    return min(at_early, _total(ended(by_early - by_late, early.max_order + 1)) - _total(made(early)) - inside)


def _total(buffers: Iterable[SchedulerBuffer]) -> float:
    return sum(_bytes(buffer.node) for buffer in buffers)


def _is_gone(user: NodeUser) -> bool:
    """Whether nothing reads what `user` makes: Inductor has then left it out, though not everywhere out of readers."""
    return not isinstance(user.node, OutputNode) and not hasattr(user.node, "min_order")


def _comes_after(user: NodeUser, operations: set[str]) -> bool:
    """Whether `user` needs one of `operations`, or is the caller, who has the graph's results."""
    return isinstance(user.node, OutputNode) or bool(user.node.ancestors & operations)


def _written_over() -> contextlib.AbstractContextManager:
    """A loop may write over an operand that nothing reads after it, whatever else has to wait for both.

    Inductor takes an operator that must only come later (it writes to a parameter which made the operand) for
    another reader: in a step with its updates, loops over most activations would be given memory of their own.
    """
    decide = SchedulerNode.decide_inplace_update

    def decided(self: SchedulerNode) -> None:
        read = {dep.name: self.scheduler.name_to_buf[dep.name] for dep in self.read_writes.reads
                if dep.name in self.scheduler.name_to_buf}
        users = {name: buffer.users for name, buffer in read.items()}
        try:
            for name, buffer in read.items():
                buffer.users = [user for user in buffer.users if not _only_waits(user, name)]
            decide(self)
        finally:
            for name, buffer in read.items():
                buffer.users = users[name]

    return mock.patch.object(SchedulerNode, "decide_inplace_update", decided)


def _only_waits(user: NodeUser, name: str) -> bool:
    return user.is_weak and all(getattr(dep, "is_fake", False)
                                for dep in user.node.read_writes.reads if dep.name == name)


def _written_by_another_name() -> contextlib.AbstractContextManager:
    """A loop that uses a buffer and does not read it by its name (it writes over it) reads it nowhere in
    particular: the buffer is not made local to the loops around both. Inductor fails with a `KeyError`."""
    read = LoopBody.get_read_expr

    def found(self: LoopBody, name: str) -> Any:
        try:
            return read(self, name)
        except KeyError:
            return None

    return mock.patch.object(LoopBody, "get_read_expr", found)


def _counted_once() -> contextlib.AbstractContextManager:
    """What one loop makes and only the same loop reads takes no memory, and what is written over its operand
    takes the operand's.

    Inductor orders kernels by an estimate of their peak which counts every result of a fused loop: the update
    of a parameter seems to need several times its gradient, and is put off for as long as that hides it.
    """
    sizes_of = memory.compute_size_for_scheduler_buffer

    def sizes(buffers: dict[str, SchedulerBuffer]) -> dict[str, tuple[int, int]]:
        found = {name: (0, 0) if _stays_in_its_loop(buffers[name]) else size
                 for name, size in sizes_of(buffers).items()}
        for name, buffer in buffers.items():
            over = _written_to(buffer)
            if over in found and found[over][0] == found[name][1]:
                found[name], found[over] = (found[name][0], 0), (0, found[over][1])
        return found

    return mock.patch.object(memory, "compute_size_for_scheduler_buffer", sizes)


def _past_peaks() -> contextlib.AbstractContextManager:
    """What a peak does not need comes after it (`kernel_order`), if that lowers it by more than an estimate is off: a cast of a
    weight that waits for its reader, and what is computed again for another gradient than that of the peak."""
    reorder = memory.reorder_for_peak_memory

    def reordered(*given: Any, **methods: Any) -> list[BaseSchedulerNode]:
        return kernel_order.past_peaks(reorder(*given, **methods), given[4], worth=_given_bytes() / SMALL)

    return mock.patch.object(memory, "reorder_for_peak_memory", reordered)


def _written_to(buffer: SchedulerBuffer) -> str | None:
    """The result of the loop that alone reads `buffer` and may write over it."""
    users = [user for user in buffer.users if not _only_waits(user, buffer.get_name())]
    if len(users) != 1 or not users[0].can_inplace:
        return None
    results = users[0].node.get_outputs()
    return results[0].get_name() if len(results) == 1 and not results[0].get_mutations() else None


def _stays_in_its_loop(buffer: SchedulerBuffer) -> bool:
    fused = V.graph.scheduler.name_to_fused_node

    def loop(node: Any) -> Any:
        if isinstance(node, SchedulerNode) and node.get_name() in fused and not node.is_reduction():
            return fused[node.get_name()], node.group
        return None

    made = loop(buffer.defining_op)
    return made is not None and bool(buffer.users) and all(loop(user.node) == made for user in buffer.users)


def _waiting_bytes(scheduler: Any) -> float:
    """Bytes of the buffers that nothing reads any more, but for the functions that are being written."""
    names = scheduler.buffer_names_to_free - V.graph.removed_buffers - V.graph.wrapper_code.freed
    buffers = [scheduler.name_to_buf[name] for name in names if name in scheduler.name_to_buf]
    return sum(_bytes(b.node) for b in buffers if b.can_free())


def _given_bytes() -> float:
    return sum(_bytes(value) for value in V.graph.graph_inputs.values() if isinstance(value, ir.IRNode))


def _bytes(value: ir.IRNode) -> float:
    """As large as the sizes of this capture make it."""
    if not value.has_tensor_output():
        return 0
    return float(V.graph.sizevars.optimization_hint(value.get_numel(), fallback=0)) * value.get_dtype().itemsize


def falls_back(target: Any) -> bool:
    """Whether Inductor has no code of its own for an operator and calls PyTorch's kernel."""
    return target in lowering.fallbacks or getattr(target, "overloadpacket", None) in lowering.fallbacks


def written_out(given: Any, result: Any) -> bool:
    """Whether Inductor writes a reduction of `given` to `result` out as an expression of its elements."""
    sizes = [value.numel() if isinstance(value, Tensor) else 0 for value in (given, result)]
    return all(isinstance(n, int) and n for n in sizes) and (
        1 < sizes[0] // sizes[1] < config.unroll_reductions_threshold)
