"""The repeated structure of a step, found from its graph: layers and micro-batches.

A stretch of the schedule that is followed by equal stretches (same operators, shapes and
constants, whatever they read) is a repetition. One that holds forward and backward is a
micro-batch, one inside a single phase a layer. Nothing is taken from module names, so that steps
written without modules have layers too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from .pieces import body, label, longest_repetition
from .step_graph import Phase, StepGraph

SHORTEST = 2  # operators: a linear layer and its activation


@dataclass(frozen=True)
class Repeat:
    """`times` equal stretches of `operators` each, one after the other.

    `nodes` are those of the first. `kind` is "micro-batch", or "layer" of the phase in `phase`
    ("backward" where an update stands inside it).
    """

    kind: str
    phase: Phase | None
    operators: int
    times: int
    nodes: tuple[fx.Node, ...]

    def __str__(self) -> str:
        what = f"{self.phase.value} of a layer" if self.phase else "micro-batch"
        return f"{self.times} × {what} ({self.operators} operators)"


def repeats(step: StepGraph) -> tuple[Repeat, ...]:
    """Every repetition of `step` in schedule order, a micro-batch before the layers inside it."""
    nodes = body(step)
    known: dict[str, int] = {}
    labels = np.array([known.setdefault(label(n), len(known)) for n in nodes], dtype=np.int64)
    return tuple(_found(step, nodes, labels, 0, len(nodes)))


def _found(step: StepGraph, nodes: Sequence[fx.Node], labels: np.ndarray, low: int,
           high: int) -> Iterator[Repeat]:
    if high - low < 2 * SHORTEST:
        return
    found = longest_repetition(labels[low:high], SHORTEST)
    if found is None:
        return
    start, period, length = low + found[0], found[1], found[2]
    times = length // period
    yield from _found(step, nodes, labels, low, start)
    first = tuple(nodes[start:start + period])
    phases = {step.phase(n) for n in first}
    phase = (None if {Phase.FORWARD, Phase.BACKWARD} <= phases else
             next(p for p in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE) if p in phases))
    yield Repeat("layer" if phase else "micro-batch", phase, period, times, first)
    if phase is None:
        yield from _found(step, nodes, labels, start, start + period)
    yield from _found(step, nodes, labels, start + times * period, high)
