"""Keep whole parameters between steps, and gather them once a step, behind their update (ZeRO 1, 2).

The step was captured as one that gathers this rank's rows of a parameter wherever it is read. Here
each rank has the whole (`StepGraph.windows`), and its rows are a part of it.

1. A gathered parameter is the whole that is there; the collective goes.
2. Every other read of the rows, in the update, reads them in the whole.
3. The new rows are not written to their place but gathered from all ranks, each with as many as the
   first has (the last ones add zeros), and written over the whole once nothing reads the old one.
4. A gather stands behind its update, wherever that is: see `update_early`.

Before:  w = wait(all_gather(p)); ..; g = wait(reduce_scatter(..)); p := p - g
After:   ..; g = wait(reduce_scatter(..)); whole := wait(all_gather(rows(whole) - g))

Memory: the whole parameters, which are inputs, in place of gathered ones that live from forward to
backward; transient is one gathered parameter at a time. Numerics: bitwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from memopt_compile.collectives import GATHER, operands, waits_of
from memopt_compile.step_graph import StepGraph, Window, storage_roots
from memopt_compile.step_pass import StepPass

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


@dataclass(frozen=True)
class KeepParameters(StepPass):
    name: ClassVar[str] = "keep_parameters"

    def requires(self, step: StepGraph) -> str | None:
        return None if step.windows else "no parameter is kept whole"

    def run(self, step: StepGraph, costs: Any = None) -> None:
        inputs = {node.name: node for node in step.placeholders}
        for launch in step.graph.find_nodes(op="call_function", target=GATHER):
            window = next((w for w in step.windows if w.rows == _rows_of(launch).name), None)
            if window is not None:
                _use_whole(step, launch, inputs[window.full])
        for window in step.windows:
            _read_in_whole(step, inputs[window.rows], inputs[window.full], window)
        last = _last_readers(step)  # all of them are there now
        for window in step.windows:
            for write in list(inputs[window.rows].users):
                full = inputs[window.full]
                _gather_written(step, write, full, window, last.get(full, write))

    def ensures(self, step: StepGraph) -> str | None:
        rows = {window.rows for window in step.windows}
        left = [n.name for n in step.placeholders if n.name in rows and n.users]
        return f"{left[0]} is used beside the whole that it is a part of" if left else None


def _rows_of(launch: fx.Node) -> fx.Node:
    """The rows that are gathered, without the padding."""
    given = launch.args[0]
    while given.op != "placeholder" and given.target in (aten.constant_pad_nd.default,
                                                         aten.view.default):
        given = given.args[0]
    return given


def _use_whole(step: StepGraph, launch: fx.Node, full: fx.Node) -> None:
    """Rule 1."""
    shape = full.meta["val"].shape
    for wait in waits_of(launch):
        value = next(v for v in (wait, *wait.users) if v.meta["val"].shape == shape and (
            v is wait or v.target is aten.slice.Tensor))  # which cuts the padding off
        dead = value.args[0]
        step.replace(value, full)
        while dead.op != "placeholder" and not dead.users:
            dead, maker = dead.args[0], dead
            step.erase(maker)


def _read_in_whole(step: StepGraph, rows: fx.Node, full: fx.Node, window: Window) -> None:
    """Rule 2."""
    for user in list(rows.users):
        if user.target is aten.copy_.default and user.args[0] is rows:
            continue  # for rule 3
        with step.graph.inserting_before(user):
            end = window.start + rows.meta["val"].shape[0]
            part = step.call(user, aten.slice.Tensor, full, 0, window.start, end)
        user.replace_input_with(rows, part)


def _last_readers(step: StepGraph) -> dict[fx.Node, fx.Node]:
    """For each input, the last node that reads it, through any view."""
    roots, last = storage_roots(step.graph), {}
    for node in step.computing():
        for argument in operands(node):
            for root in roots[argument]:
                last[root] = node
    return last


def _gather_written(step: StepGraph, write: fx.Node, full: fx.Node, window: Window,
                    last: fx.Node) -> None:
    """Rule 3. `last` is the last reader of the whole: it, or the write, is ahead of the new whole."""
    rows, new = write.args[:2]
    missing = window.each - rows.meta["val"].shape[0]
    with step.graph.inserting_before(write):
        if missing:
            new = step.call(write, aten.constant_pad_nd.default, new,
                            [0, 0] * (rows.meta["val"].dim() - 1) + [0, missing], 0)
        launch = step.call(write, GATHER, new, window.ranks, window.group)
    place = max(write, last)  # in the order of the graph
    with step.graph.inserting_after(place):
        wait = step.call(write, c10d.wait_tensor.default, launch)
    with step.graph.inserting_after(wait):
        total = len(full.meta["val"])
        gathered = wait if len(wait.meta["val"]) == total else step.call(
            write, aten.slice.Tensor, wait, 0, 0, total)
    with step.graph.inserting_after(gathered):
        step.call(write, aten.copy_.default, full, gathered)
    write.replace_all_uses_with(write.args[1])
    step.erase(write)
