"""Run what the host computes ahead of a step, and hand its numbers to the device in one copy.

1. Counts of steps are mostly all the same, and so is what comes of them: inputs with equal values are one, and
   the program for that is kept (`PROGRAMS` of them). PyTorch computes each of a few numbers once, where the step
   has them for each parameter.
2. Numbers lie in one buffer for each dtype, `SLOT` bytes apart, which stays where it is: a CUDA graph reads them
   there. The device copies them in the order of its work, from memory that nothing else is written to meanwhile.
3. New counts are written when the step has run: one that fails has not been counted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ..errors import CaptureError
from ..host_part import SLOT, HostPart
from ..step_graph import StepGraph

PROGRAMS = 8


@dataclass(eq=False)
class Ahead:
    """A boxed callable: what `run` does for the inputs of `step` that are not numbers made on the host."""

    run: Callable[[list], Any] = field(repr=False)
    step: StepGraph = field(repr=False)
    where: str
    programs: dict[tuple[int, ...], _Program] = field(default_factory=dict, repr=False)

    _boxed_call = True

    def __post_init__(self) -> None:
        self.part: HostPart = self.step.ahead

    @functools.cached_property
    def buffers(self) -> dict[torch.dtype, tuple[Tensor, list[int]]]:
        """By dtype the buffer, a row for each number, and which of `part.numbers` are in it."""
        values = [self.step.placeholders[i].meta["val"] for i in self.part.numbers]
        found = {}
        for dtype in dict.fromkeys(v.dtype for v in values):
            places = [i for i, v in enumerate(values) if v.dtype is dtype]
            rows = len(places), SLOT // dtype.itemsize
            found[dtype] = torch.zeros(rows, dtype=dtype, device=values[places[0]].device), places
        return found

    @functools.cached_property
    def groups(self) -> list[list[int]]:
        """Those of `part.given` that may be the same number: of one dtype."""
        found: dict[torch.dtype, list[int]] = {}
        for i, node in enumerate(self.part.module.graph.find_nodes(op="placeholder")):
            if not node.meta["val"].dim() and not node.meta["val"].is_complex():
                found.setdefault(node.meta["val"].dtype, []).append(i)
        return list(found.values())

    @functools.cached_property
    def numbers(self) -> list[Tensor]:
        """Where the device reads each."""
        rows = {i: row for buffer, places in self.buffers.values() for i, row in zip(places, buffer)}
        return [rows[i][0] for i in range(len(rows))]

    @torch.no_grad()
    def __call__(self, inputs: list) -> Any:
        recording = torch.cuda.is_current_stream_capturing()  # by the caller, whose graph has rates as they are now
        if recording and self.part.written:
            raise CaptureError("a CUDA graph of your own would not count the optimizer's steps, which the host does",
                               where=self.where, do="leave recording to cuda_graphs=True, or have the counts on the "
                               "device (capturable=True)")
        host = [inputs[i] for i in self.part.given]
        written = [inputs[i] for i in self.part.written]
        classes = same_values(host, self.groups)
        if classes not in self.programs:
            if len(self.programs) == PROGRAMS:
                self.programs.clear()
            self.programs[classes] = _Program.of(self.part, classes, [places for _, places in self.buffers.values()])
        packed, new = self.programs[classes](host)
        for (buffer, _), values in zip(self.buffers.values(), packed):
            if recording:
                for row, number in zip(buffer, values.tolist()):
                    row.fill_(number)
                continue
            # Whatever the caller's default device is.
            rows = torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu", pin_memory=buffer.is_cuda)
            rows[:, 0] = values
            buffer.copy_(rows, non_blocking=True)
        inputs.extend(self.numbers)
        results = self.run(inputs)
        if written:
            torch.ops.aten._foreach_copy_.default(written, new)
        return results


def same_values(host: list[Tensor], groups: list[list[int]]) -> tuple[int, ...]:
    """For each the position of the first in its group that is the same number, bit for bit."""
    classes = list(range(len(host)))
    for group in groups:
        first: dict[Any, int] = {}
        for i, number in zip(group, torch.stack([host[i] for i in group]).tolist()):
            classes[i] = first.setdefault(number or (number, math.copysign(1, number)), i)
    return tuple(classes)


@dataclass(frozen=True, eq=False)
class _Program:
    """The host's part where some inputs are the same: the distinct results of `module`, which of them stand in
    each buffer, and which are new values of inputs."""

    module: fx.GraphModule
    packed: tuple[tuple[tuple[int, ...], Tensor], ...]
    new: tuple[int, ...]

    @classmethod
    def of(cls, part: HostPart, classes: tuple[int, ...], buffers: list[list[int]]) -> _Program:
        graph = shared(part.module.graph, classes)
        output = graph.output_node()
        distinct = list(dict.fromkeys(output.args[0]))
        places = [distinct.index(n) for n in output.args[0]]
        output.args = (tuple(distinct),)
        packed = []
        for buffer in buffers:
            wanted = list(dict.fromkeys(places[i] for i in buffer))
            packed.append((tuple(wanted), torch.tensor([wanted.index(places[i]) for i in buffer], device="cpu")))
        return cls(fx.GraphModule(part.module, graph), tuple(packed), tuple(places[len(part.numbers):]))

    def __call__(self, host: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        made = self.module(*host)
        return ([torch.stack([made[i] for i in wanted])[index] for wanted, index in self.packed],
                [made[i] for i in self.new])


def shared(graph: fx.Graph, classes: tuple[int, ...]) -> fx.Graph:
    """A copy of a graph without side effects in which equal inputs are one, and so is what is computed equally of them."""
    new, known = fx.Graph(), {}
    twins: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            twins[node] = new.node_copy(node)
    given = list(twins)
    twins = {node: twins[given[c]] for node, c in zip(given, classes)}
    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), twins.__getitem__)
            key = f"{node.target}{args!r}{kwargs!r}"
            twins[node] = known[key] if key in known else known.setdefault(key, new.node_copy(node, twins.__getitem__))
        elif node.op not in ("placeholder", "output"):
            twins[node] = new.node_copy(node)
    new.output(tuple(map(twins.__getitem__, graph.output_node().args[0])))
    return new
