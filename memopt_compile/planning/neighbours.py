"""Faster plans that are mostly like one that fits.

Near the smallest peak a program of all decisions takes seconds for each solution, and its plans overflow in bursts of which its
rows say little. Most decisions have to be what they are there. So these are held to what a plan that fits has, and a program of the others takes
a tenth of a second:

1. Free are the decisions in which the plan is not as the relaxed program has it, and of the others a `SHARE` by chance (the same each time).
   Whenever that comes to nothing more of them are, up to `MOST`.
2. The program is asked for what is faster by `FASTER`. What comes out is simulated, and changed until it fits (`mending`); if that is
   faster, it is the next plan.
3. What overflows gets rows, of moments in bursts too, and is held to as much less if it has one. Once no solution is left
   it is held to half as much less.

Nothing is proved by that. It ends after `PATIENCE` rounds without a faster plan.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .integer_program import Point, Program
from .mending import mended
from .packing import Packed
from .positions import positions, tighten
from .rematerialization import Problem, simulate

FASTER = 0.004  # of a plan's seconds
PATIENCE = 4  # rounds
SHARE, WIDER, MOST = 0.05, 1.5, 0.2
TOLERANCE = 0.1  # within which the relaxed program has what a plan has
GAP, NODES = 0.02, 20  # of a program of few decisions


def improved(problem: Problem, groups: Sequence[int], limit: int, again: frozenset[int], packed: Mapping[int, Packed]
             ) -> tuple[frozenset[int], Mapping[int, Packed]]:
    """The fastest such plan whose transient peak is at most `limit`; `again` and `packed` are one."""
    model, slack = Program(problem, groups, strict=True), dict.fromkeys(positions(problem), 0)
    best, chance, share, since = (again, packed), random.Random(0), SHARE, 0
    while since < PATIENCE:
        since += 1
        seconds = problem.cost(*best)
        model.faster_than(seconds * (1 - FASTER))
        model.out, model.last = {}, None
        relaxed = model.relaxed(slack, limit).x
        if relaxed is None and not any(slack.values()):
            break
        solved = None
        if relaxed is not None:
            model.out = held(model, best, relaxed, share, chance)
            solved = model.solve(slack, limit, GAP, NODES)
        if solved is None:
            share = min(MOST, share * WIDER)
            _halve(slack)
            continue
        again, packed, *_ = solved
        outcome = simulate(problem, again, packed)
        fits = again if outcome.peak_bytes <= limit else mended(problem, groups, again, packed, limit)
        if fits is not None and problem.cost(fits, packed) < seconds:
            best, share, since = (fits, packed), max(SHARE, share / WIDER), 0
        if outcome.peak_bytes <= limit:
            _halve(slack)
        else:
            tighten(slack, outcome, limit, moments=True)
    return best


def held(model: Program, plan: tuple[Collection[int], Mapping[int, Packed]], relaxed: Any, share: float, chance: random.Random
         ) -> dict[int, int]:
    """The decisions that rule 1 holds, and to what. `relaxed` is the solution of the relaxed program."""
    return {column: value for column, value in model.decisions(*plan).items()
            if abs(relaxed[column] - value) < TOLERANCE and chance.random() > share}


def _halve(slack: dict[Point, int]) -> None:
    slack.update((point, less // 2) for point, less in slack.items())
