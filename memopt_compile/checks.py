"""Checks of data within a step: an ``assert`` on a tensor, and ``if not math.isfinite(loss.item()): raise ..``.

1. The graph has the side of such a branch that does not raise, behind the operator `require` (`compat.branches`).
2. What a step changes comes after the checks before it (`ordering`, rule 5). So nothing has changed where `require`
   fails, and eager runs the step of the user with the same random numbers (`by_eager`): it prints, changes and raises
   what it would have. A step of which that is not so ends at the branch (`can_be_left`).
3. torch's own operators that raise (`torch._assert_async`) raise from the graph. One that looks at gradients has the step
   run uncompiled (`of_gradients`).
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import has_side_effect

from .aliases import mutated_args, storage_roots
from .collectives import is_collective
from .compat.trace import CHECKS, pytree
from .errors import NumericsError

_told: list[Callable[[], None]] = []


class Failed(Exception):
    """What the graph requires is not so."""


@torch.library.custom_op("memopt::require", mutates_args=())
def require(holds: Tensor, where: str) -> None:
    """Nothing if `holds`, a tensor of one element; else raises, for the user's line `where`."""
    if not holds:
        raise Failed(where)
    for told in _told[-1:]:
        told()


require.register_fake(lambda holds, where: None)
REQUIRE = has_side_effect(torch.ops.memopt.require.default)


@contextlib.contextmanager
def passing(told: Callable[[], None]) -> Iterator[None]:
    """Have `told` called for each branch within that goes on."""
    _told.append(told)
    try:
        yield
    finally:
        _told.pop()


def is_check(node: fx.Node) -> bool:
    return node.op == "call_function" and (node.target is REQUIRE or node.target in CHECKS)


def branches(gm: fx.GraphModule) -> bool:
    """Whether a graph has left out the side of a branch that raises."""
    return bool(gm.graph.find_nodes(op="call_function", target=REQUIRE))


def can_be_left(step: Any) -> bool:
    """Whether eager can do a `StepGraph`'s step where one of its branches fails: nothing that stays has changed there,
    and no other rank goes on with this one."""
    nodes, inputs = list(step.graph.nodes), set(step.placeholders)
    if any(map(is_collective, nodes)):
        return False
    last = max((i for i, node in enumerate(nodes) if node.target is REQUIRE), default=0)
    roots = storage_roots(step.graph)
    return not any(roots[a] & inputs for node in nodes[:last] for a in mutated_args(node))


def of_gradients(gm: fx.GraphModule) -> fx.Node | None:
    """The first check in a graph of Dynamo's that depends on a backward in it, by values or by what was changed."""
    made: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.target is torch.autograd.grad or not made.isdisjoint(node.all_input_nodes):
            if node.op == "call_function" and node.target in CHECKS:
                return node
            made.add(node)
            if str(getattr(node.target, "__name__", node.target)).endswith(("_", "setitem")):  # in place
                made.update(each for each in pytree.tree_leaves(node.args[:1]) if isinstance(each, fx.Node))
    return None


def by_eager(run: Callable, code: CodeType, restoring: Callable[[], Any]) -> Callable:
    """`run`, what Dynamo's code for `code` calls, and the user's own code where what it requires is not so.

    `restoring()` is a context that gives what puts the random numbers back.

    Raises, from a call:
        NumericsError: eager does not raise.
    """
    def checked(*inputs: Any) -> Any:
        with restoring() as restore:
            try:
                return run(*inputs)
            except Failed as failed:
                where = str(failed)
            restore()
        _again(_caller(code), code)
        raise NumericsError("the step requires what does not hold, and eager has gone on: its results are lost, and what "
                            "it changed has changed", where=where, do="let nothing catch within the step what is raised there")

    return checked


def _caller(code: CodeType) -> FrameType:
    """The frame that runs what Dynamo made of `code`."""
    frame = sys._getframe(2)
    while (frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_code.co_name) != (
            code.co_filename, code.co_firstlineno, code.co_name):
        frame = frame.f_back
    return frame


def _closure(frame: FrameType, code: CodeType) -> tuple[CellType, ...]:
    """The cells of the function that `frame` runs, which no frame tells: of those with its code, those that `frame` sees
    changes of. If they are not found, others with the same contents."""
    for function in gc.get_referrers(code):
        if isinstance(function, FunctionType) and function.__code__ is code and all(
                _is_seen(cell, name, frame) for cell, name in zip(function.__closure__ or (), code.co_freevars)):
            return function.__closure__ or ()
    known = frame.f_locals
    return tuple(CellType(*([known[name]] if name in known else [])) for name in code.co_freevars)


def _is_seen(cell: CellType, name: str, frame: FrameType) -> bool:
    try:
        held = [cell.cell_contents]
    except ValueError:  # nothing yet
        held = []
    cell.cell_contents = mark = object()
    try:
        return frame.f_locals.get(name) is mark
    finally:
        del cell.cell_contents
        for value in held:
            cell.cell_contents = value


def _again(frame: FrameType, code: CodeType) -> None:
    """Run `code` uncompiled for the arguments of `frame`, which has done nothing yet."""
    known, names = dict(frame.f_locals), iter(code.co_varnames)
    function = FunctionType(code, frame.f_globals, closure=_closure(frame, code))
    given = [known[next(names)] for _ in range(code.co_argcount)]
    named = {name: known[name] for _, name in zip(range(code.co_kwonlyargcount), names)}
    if code.co_flags & 0x04:  # *args
        given += known[next(names)]
    if code.co_flags & 0x08:  # **kwargs
        named |= known[next(names)]
    torch.compiler.disable(function)(*given, **named)
