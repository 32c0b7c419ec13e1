"""Planning again during training, as outliers in activations come and go.

Adacc (section 3.4) watches how many columns of an activation are outliers, and solves again when that
has changed what compression yields. Here the step that is watched returns one more number for each
activation that could be packed with its outlier columns apart: how many columns have a sum of
magnitudes more than 3 standard deviations above the mean of these sums. That decides what the planner is
offered in place of "int4 outliers":

    no column                 "int4": fewer bytes, and no columns to be picked
    at most 1 in 32           "int4 outliers": all of them are kept as they are
    more                      "int8": the rest would be hidden in the scales of their groups

Steps 1, 2, 4, 8 .. are watched; a new plan begins the count anew. A gentler format is wanted at once, a
coarser one when two watched steps in a row agree, and twice as many each time that this was too early:
counts flicker about a threshold, and a plan takes as long as many steps. The step is planned again when
5% of the watched bytes want another format than they have. The plan changes between steps, so that
nothing is lost.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compression import in_rows, slabs_of
from ..memory_plan import MemoryPlan
from ..options import format_bytes
from ..quantization.named import FORMATS
from ..step_graph import Phase, StepGraph, nbytes
from .sensitivity import sensitivity

log = logging.getLogger("memopt_compile")
WATCHED = "int4 outliers"
LEVELS = ("int4", WATCHED, "int8")  # the coarsest first
DEVIATIONS = 3.0
MATTERS = 0.05  # of the watched bytes


@torch.library.custom_op("memopt::outlier_columns", mutates_args=())
def outlier_columns(value: Tensor) -> Tensor:
    """How many columns are outliers: an int64 of no dimensions."""
    packing, rows = FORMATS[WATCHED], in_rows(value)
    sums = sum(packing.statistic(rows[some]) for some in slabs_of(packing, *rows.shape))
    return (sums > sums.mean() + DEVIATIONS * sums.std(correction=0)).sum()


outlier_columns.register_fake(lambda value: value.new_empty((), dtype=torch.int64))
OUTLIER_COLUMNS = torch.ops.memopt.outlier_columns.default


def level(outliers: int, columns: int) -> str:
    """The format for an activation with so many outliers among its columns."""
    if not outliers:
        return LEVELS[0]
    return LEVELS[1] if outliers <= max(1, int(columns * FORMATS[WATCHED].share)) else LEVELS[2]


class Watched(NamedTuple):
    columns: int
    nbytes: int


@dataclass
class Watch:
    """Sees a step on its way through the passes, and makes the one that is watched of it."""

    compress: str | None
    names: frozenset[str] = frozenset()
    step: StepGraph | None = None
    watched: dict[str, Watched] = field(default_factory=dict)

    def observe(self, name: str, step: StepGraph) -> None:
        """To be told of `step` behind the pass `name`."""
        if name == "plan_memory":  # from here on backward reads copies
            self.names = frozenset(
                n.name for n, forms in sensitivity(step, self.compress).formats.items()
                if {*forms} & {*LEVELS} and n.meta["val"].stride(-1) == 1 and n.meta["val"].shape[-1] >= 32)
        elif name == "compress":
            self.step = step.copy()
            self.watched = self._count(self.step)

    def _count(self, step: StepGraph) -> dict[str, Watched]:
        """Have `step` return the outlier columns of the activations behind its other results; returns
        the activations by name, in their order."""
        watched = [n for n in step.computing()
                   if n.name in self.names and step.phase(n) is Phase.FORWARD]
        counts = []
        for value in watched:
            with step.graph.inserting_after(value):
                counts.append(step.call(value, OUTLIER_COLUMNS, value))
        output = step.graph.output_node()
        output.args = ((*output.args[0], *counts),)
        return {n.name: Watched(n.meta["val"].shape[-1], nbytes(n.meta["val"])) for n in watched}


@dataclass(frozen=True)
class Program:
    """A planned step: what to `run`, its `plan` and its predicted peak; and if it adapts, what returns the
    number of outliers of the activations `watched` too. Both are boxed callables."""

    run: Callable[[list], Any]
    plan: MemoryPlan | None
    peak_bytes: int
    watching: Callable[[list], Any] | None = None
    watched: Mapping[str, Watched] = field(default_factory=dict)


@dataclass(frozen=True)
class Replan:
    """A plan made `after` so many calls, since for `changed` activations another format is right; with
    its predicted peak. None if it did not fit, so that the one before stayed."""

    after: int
    changed: int
    plan: MemoryPlan | None
    peak_bytes: int | None

    def __str__(self) -> str:
        text = f"after step {self.after}: {self.changed} activations changed, "
        if self.plan is None:
            return text + "no plan fits that, the one before stays"
        return text + f"peak {format_bytes(self.peak_bytes or 0)}, {1e3 * self.plan.seconds:.3f} ms added"


@dataclass
class Adaptive:
    """A step that is watched at times and planned again, a boxed callable.

    `again` plans with these formats in place of "int4 outliers", by name, and says None if that does
    not fit; `history` gets every change.
    """

    program: Program
    again: Callable[[Mapping[str, str]], Program | None]
    where: str
    history: list[Replan]
    wanted: dict[str, str] = field(default_factory=dict)  # formats
    planned: dict[str, str] = field(default_factory=dict)
    looks: Counter[str] = field(default_factory=Counter)  # in a row that would have a coarser one do
    patience: dict[str, int] = field(default_factory=dict)  # how many of these it takes
    calls: int = 0
    next_watch: int = 1
    interval: int = 1

    _boxed_call = True

    def __call__(self, inputs: list) -> Any:
        self.calls += 1
        if self.calls < self.next_watch:
            return self.program.run(inputs)
        watched = self.program.watched
        returned = self.program.watching(inputs)
        results = returned[:len(returned) - len(watched)]
        counts = torch.stack(returned[len(results):]).tolist()  # one wait for a device
        self._settle({name: level(count, each.columns)
                      for (name, each), count in zip(watched.items(), counts)})
        changed = [name for name, form in self.wanted.items() if form != self.planned.get(name, WATCHED)]
        total = sum(each.nbytes for each in watched.values())
        matters = sum(watched[name].nbytes for name in changed if name in watched) > MATTERS * total
        self.interval = 1 if matters or self.calls == 1 else 2 * self.interval
        self.next_watch = self.calls + self.interval
        if matters:
            self._plan_again(len(changed))
        return results

    def _settle(self, now: Mapping[str, str]) -> None:
        """Want what is gentler, and what has been coarser for long enough."""
        for name, found in now.items():
            known, patience = self.wanted.get(name, WATCHED), self.patience.get(name, 2)
            coarser = LEVELS.index(found) < LEVELS.index(known)
            self.looks[name] = self.looks[name] + 1 if coarser else 0
            if coarser and self.looks[name] < patience or found == known:
                continue
            self.wanted[name], self.looks[name] = found, 0
            self.patience[name] = patience if coarser else 2 * patience

    def _plan_again(self, changed: int) -> None:
        found, self.planned = self.again(self.wanted), dict(self.wanted)
        self.program = found or self.program
        self.history.append(Replan(self.calls, changed, found and found.plan, found and found.peak_bytes))
        log.info("%s: %s", self.where, self.history[-1])
