"""The points of a step for which an integer program has rows: where most is alive, and where plans of it overflow."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import numpy as np

from .integer_program import Moment, Point
from .rematerialization import Outcome, Problem

CHUNKS = 40  # stretches of the schedule that get a position each to begin with


def positions(problem: Problem) -> Iterable[int]:
    """The highest position of each of `CHUNKS` stretches."""
    edges = np.linspace(0, len(problem.live), CHUNKS + 1, dtype=int)
    return {int(low + np.argmax(problem.live[low:high])) for low, high in zip(edges, edges[1:])
            if low < high}


def tighten(slack: dict[Point, int], outcome: Outcome, bound: int, moments: bool = False) -> bool:
    """Add the worst point of each stretch above `bound`, or hold it to less; whether all are new. In a burst it is the position
    before which that is, or with `moments` the one in it."""
    worst: dict[int, tuple[int, int]] = {}  # by stretch: excess, place
    stretch = 0
    for place, size in enumerate(outcome.live):
        if size <= bound:
            stretch += 1
        elif size - bound > worst.get(stretch, (0, 0))[0]:
            worst[stretch] = size - bound, place
    points: dict[Point, int] = {}
    for excess, place in sorted(worst.values()):  # of one point the most
        points[_point(outcome, place) if moments else outcome.at[place]] = excess
    fresh = slack.keys().isdisjoint(points)
    for point, excess in points.items():
        slack[point] = slack[point] + excess if point in slack else 0
    return fresh


def _point(outcome: Outcome, place: int) -> Point:
    """What the row for this place of a plan's schedule is of."""
    def again(at: int) -> int | None:
        key = outcome.order[at]
        return key[1] if isinstance(key, tuple) and key[0] == "again" else None

    position = outcome.at[place]
    if (operation := again(place)) is None:
        return position
    burst = range(bisect.bisect_left(outcome.at, position), bisect.bisect_right(outcome.at, position))
    earlier, later = (frozenset(o for at in part if (o := again(at)) is not None)
                      for part in (range(burst.start, place), range(place + 1, burst.stop)))
    return Moment(position, operation, earlier, later)
