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

from .lowering.pieces import body, label
from .lowering.repetition import longest_repetition
from .planning.rematerialization import Problem
from .step_graph import Phase, StepGraph

SHORTEST = 2  # operators: a linear layer and its activation
NUMBER = 16  # bytes of a complex one, the largest


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


def groups(problem: Problem) -> list[int]:
    """A number for each operation, equal for those that are decided together.

    Those are the operations in the same place of equal micro-batches, but for the first, beside which no
    gradients are there yet, and of equal layers in one of the stretches into which `halves` cuts these.
    What makes single numbers is decided alone: each layer's dropout looks up another seed, and all may be looked up in the first.
    """
    number = list(range(len(problem.operations)))
    places = [o for o, operation in enumerate(problem.operations)
              if any(problem.values[v].nbytes > NUMBER for v in operation.makes)]
    operations = [problem.operations[o] for o in places]
    known: dict[str, int] = {}
    labels = np.array([known.setdefault(" ".join(map(label, (*o.inside, o.node))), len(known)) for o in operations],
                      dtype=np.int64)
    backward = np.cumsum(problem.backward)  # nodes of backward so far

    def tie(low: int, high: int) -> None:
        found = longest_repetition(labels[low:high], SHORTEST) if high - low > 2 * SHORTEST else None
        if found is None:
            return
        start, period, times = low + found[0], found[1], found[2] // found[1]
        end = start + times * period
        tie(low, start)
        tie(end, high)
        separate = backward[operations[start + period].position] > backward[operations[start].position]
        if separate:  # micro-batches
            tie(start, start + period)
            tie(start + period, start + 2 * period)
        for turn, of in enumerate([0, *[1] * (times - 1)] if separate else halves(times)):
            for i in range(period):
                number[places[start + turn * period + i]] = number[places[start + of * period + i]]

    tie(0, len(operations))
    return number


def halves(count: int) -> list[int]:
    """For each of `count` turns, the first of its stretch: half of them, half of the rest, and so
    on. Stretches of these sizes add up to any number of turns.

    >>> halves(6)
    [0, 0, 0, 3, 3, 5]
    """
    first: list[int] = []
    while len(first) < count:
        size = (count - len(first) + 1) // 2
        first += [len(first)] * size
    return first
