"""Which operations to run again and which values to pack: the plan that fits a limit in the least time, and the one with
the smallest peak.

Plans come of an integer program (`integer_program`), of which only some positions are written out. A plan is simulated
exactly (`rematerialization.simulate`); where it is over the limit that position is added, or, if it is there and the
chain of recomputations itself is what overflows, held to as much less (or half of it); then it is solved again. HiGHS (through scipy)
proves the gap of its last solution. Where that leaves the plan as it is, the program aims a little lower (`LESS`). Where a plan
overflows by more than `BURST` no position is what is missing: then it is changed until it fits (`mending`), which is faster
than to solve a large program that does not know why. The gap is then that of the program's bound for the first solution;
if it is over `COARSE` the program is solved finely after all. Either way what comes out fits by simulation, not by the model.
A plan that is not proved to `GAP` is looked for once more by a program with rows for moments in bursts (`_by_moments`), unless
bursts are so much of it that nothing is near what positions prove (`FUTILE`).
For the smallest peak the program minimizes that, with positions added and plans changed in the same way.
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .integer_program import Moment, Point, Program
from .mending import mended
from .packing import Packed
from .rematerialization import Outcome, Problem, fingerprint, simulate

CHUNKS = 40  # stretches of the schedule that get a position each to begin with
ROUNDS = 24  # of adding positions
PROBES = 6  # of them to find the smallest peak
FEW = 2  # of them beside plans that overflow for another reason
BURST = 0.05  # of the limit: what is above it by more is in a burst, and not at a position that was not written out
SMALL = 5000  # rows of a program that is solved finely even so; larger ones are where the changed plan is not proved to `COARSE`
LESS = (0, 0.002, 0.005, 0.01, 0.02, 0.04)  # of the limit, by which a program aims lower until a plan fits
FAR = 8  # times a step of these, beyond which it is passed by: so far above the limit is the last plan
REMEMBERED = 100  # plans: for a refusal up to fifty limits are tried, and the smallest peak is asked for again and again
RESOLUTION = 0.03  # of the smallest peak
GAP = 0.01
FUTILE = 0.25  # where bursts decide more than positions can prove, each plan has others
COARSE = 0.1  # the gap for a first look
FIRST = 1.0  # the same if any solution will do: proving one to be fast takes most of the time

_found: dict[bytes, tuple[Solution, dict[int, str]] | None] = {}  # by what was asked, in the order of the last use


@dataclass(frozen=True)
class Solution:
    """Operations that run `again`; the transient `peak_bytes` by simulation; the `seconds` added;
    the share by which fewer might do, as HiGHS proved it (`gap`) for its program; and how the values
    are `packed` that are."""

    again: frozenset[int]
    peak_bytes: int
    seconds: float
    gap: float
    packed: Mapping[int, Packed] = field(default_factory=dict)


def cheapest(problem: Problem, limit_bytes: int, groups: Sequence[int],
             at_most: float = math.inf) -> Solution | None:
    """The fastest choice with a transient peak of at most `limit_bytes`; None if none was found.

    `groups` has a number for each operation: those of one number are decided together. A choice that
    adds more than `at_most` seconds is of no use.
    """
    if max(problem.live, default=0) <= limit_bytes:
        return Solution(frozenset(), max(problem.live, default=0), 0.0, 0.0)
    if at_most < math.inf and _key(asked := ("cheapest", limit_bytes, math.inf), problem, groups) in _found:
        plan = _known(asked, problem, groups, lambda: None)  # what was found without a bound; or nothing is, or it is too slow
        return plan if plan and plan.seconds <= at_most else None
    return _known(("cheapest", limit_bytes, at_most), problem, groups,
                  lambda: _cheapest(problem, limit_bytes, groups, at_most))


def _cheapest(problem: Problem, limit: int, groups: Sequence[int], at_most: float) -> Solution | None:
    plan = _by_positions(problem, limit, groups, at_most)
    if plan is None and at_most < math.inf and Program(problem, groups, at_most, strict=True).solve(
            dict.fromkeys(_positions(problem), 0), limit, FIRST):  # there may be one for moments to find
        plan = _cheapest(problem, limit, groups, math.inf)
        return plan if plan and plan.seconds <= at_most else None
    return _by_moments(problem, limit, groups, plan) if plan and GAP < plan.gap <= FUTILE else plan


def _by_moments(problem: Problem, limit: int, groups: Sequence[int], plan: Solution) -> Solution:
    """A faster plan than this one, if one comes out once moments in bursts have rows: what overflows there is no reason any more
    to hold positions to less. Such rows are of the bursts that one plan has, so that `plan` may be the faster one."""
    model, slack = Program(problem, groups, strict=True), dict.fromkeys(_positions(problem), 0)
    proved, over = plan.seconds * (1 - plan.gap), 0.0
    for less in LESS:
        if less < over / FAR:
            continue
        found = _nearest(model, limit, slack, GAP, PROBES, int(limit * (1 - less)), moments=True)
        rival = found and _mended(problem, groups, found, limit, proved)
        if rival and rival.seconds < plan.seconds:
            plan = rival
        if found is None or found.peak_bytes <= limit:
            break
        over = found.peak_bytes / limit - 1
    return plan


def _by_positions(problem: Problem, limit: int, groups: Sequence[int], at_most: float) -> Solution | None:
    model, slack = Program(problem, groups, at_most), dict.fromkeys(_positions(problem), 0)
    rough = _nearest(model, limit, slack, COARSE, 1)  # it is to say which positions are missing
    if rough is None or rough.gap <= GAP and rough.peak_bytes <= limit:
        return rough
    burst, tries, proved = rough.peak_bytes > limit * (1 + BURST), [rough], rough.seconds * (1 - rough.gap)

    def fastest() -> Solution | None:
        plans = (_mended(problem, groups, each, limit, proved)
                 for i, each in enumerate(tries)
                 if each and (each.again, each.packed) not in [(t.again, t.packed) for t in tries[:i] if t])
        return min((each for each in plans if each and each.seconds <= at_most), key=lambda each: each.seconds, default=None)

    def any_plan() -> Solution | None:  # of any seconds: what it is changed to may be fast
        anew = model if at_most == math.inf else Program(problem, groups)
        return _nearest(anew, limit, dict.fromkeys(_positions(problem), 0), FIRST, FEW)

    large = burst and len(model.rows.low) > SMALL
    if burst:
        tries.append(any_plan())
        if large and (plan := fastest()) and plan.gap <= COARSE:
            return plan
    if rough.peak_bytes <= limit:
        model.rule_out(slack, limit, rough.seconds, sum(p.error for p in rough.packed.values()))
    over = 0.0
    for less in LESS:
        if less < over / FAR:
            continue
        fine = _nearest(model, limit, slack, GAP, ROUNDS, int(limit * (1 - less)))
        tries.append(fine)
        if fine and not less:
            proved = max(proved, fine.seconds * (1 - fine.gap))
        if fine is None or fine.peak_bytes <= limit:
            break
        over = fine.peak_bytes / limit - 1
    if (plan := fastest()) is None and not burst:
        tries.append(any_plan())
        plan = fastest()
    if plan and plan.gap > GAP and any(slack.values()):  # is it that much slower than what nothing is held to less in?
        free = model.solve(dict.fromkeys(slack, 0), limit, GAP)
        if free:
            plan = replace(plan, gap=_gap(plan.seconds, max(proved, problem.cost(*free[:2]) * (1 - free[2]))))
    return plan


def _mended(problem: Problem, groups: Sequence[int], plan: Solution, limit: int, proved: float) -> Solution | None:
    """`plan`, changed until it fits, with its distance from the seconds that are `proved` to be needed."""
    if plan.peak_bytes <= limit:
        return replace(plan, gap=_gap(plan.seconds, proved))
    again = mended(problem, groups, plan.again, plan.packed, limit)
    if again is None:
        return None
    seconds = problem.cost(again, plan.packed)
    return Solution(again, simulate(problem, again, plan.packed).peak_bytes, seconds, _gap(seconds, proved), plan.packed)


def _gap(seconds: float, proved: float) -> float:
    return max(0.0, 1 - proved / seconds) if seconds else 0.0


def _key(asked: tuple, problem: Problem, groups: Sequence[int]) -> bytes:
    return hashlib.sha256(repr((asked, tuple(groups), fingerprint(problem))).encode()).digest()


def _known(asked: tuple, problem: Problem, groups: Sequence[int], find: Callable[[], Solution | None]
           ) -> Solution | None:
    """What was found for an equal problem before: a budget has copies of a step planned in several ways, some of them
    alike up to here. Formats are remembered by their names, so that no graph is kept."""
    key = _key(asked, problem, groups)
    if key in _found:
        found = _found.pop(key)
    else:
        plan = find()
        found = plan and (replace(plan, packed={}), {v: p.form for v, p in plan.packed.items()})
    _found[key] = found
    if len(_found) > REMEMBERED:
        del _found[next(iter(_found))]
    if found is None:
        return None
    plan, forms = found
    return replace(plan, packed={v: next(p for p in problem.values[v].packed if p.form == form) for v, form in forms.items()})


def smallest(problem: Problem, groups: Sequence[int]) -> Solution:
    """The choice with the smallest transient peak that was found, about `RESOLUTION` above what the program has. Of its seconds
    nothing is proved (a gap of 1)."""
    return _known(("smallest",), problem, groups, lambda: _smallest(problem, groups))  # type: ignore[return-value]


def _smallest(problem: Problem, groups: Sequence[int]) -> Solution:
    best = Solution(frozenset(), max(problem.live, default=0), 0.0, 0.0)
    model, slack = Program(problem, groups, strict=True), dict.fromkeys(_positions(problem), 0)
    for _ in range(PROBES):
        solved = model.solve(slack, None, RESOLUTION)
        if solved is None:
            break
        again, packed, _, aim = solved
        outcome = simulate(problem, again, packed)
        found = Solution(again, outcome.peak_bytes, problem.cost(again, packed), 1.0, packed)
        found = (_mended(problem, groups, found, aim, 0.0)
                 or _mended(problem, groups, found, int((aim * found.peak_bytes) ** 0.5), 0.0) or found)
        best = min(best, found, key=lambda plan: plan.peak_bytes)
        if best.peak_bytes <= aim * (1 + RESOLUTION):
            break
        _tighten(slack, outcome, aim)
    return best


def _nearest(model: Program, limit: int, slack: dict[Point, int], gap: float,
             rounds: int = ROUNDS, aim: int | None = None, moments: bool = False) -> Solution | None:
    """Solve, simulate and add positions to `slack` until the plan fits; else the plan that came nearest
    to it, None if not even the program has one. It ends where a plan comes out again: what overflows is in no row.
    Positions that are held to so much less that nothing is left are held to half as much less, once. The program's limit
    is `aim`, if that is given; with `moments` what overflows in a burst gets a row, and then nothing is proved."""
    problem, nearest, aim, last = model.problem, None, limit if aim is None else aim, None
    halved = fresh = False
    for _ in range(rounds):
        solved = model.solve(slack, aim, gap)
        if solved is None and nearest and not halved and any(slack.values()):
            halved = True
            slack.update((position, less // 2) for position, less in slack.items())
            continue
        if solved is None or solved[:2] == last and not fresh:
            break
        again, packed, proved, _ = solved
        last = again, packed
        outcome = simulate(problem, again, packed)
        if nearest is None or outcome.peak_bytes < nearest.peak_bytes:
            held = moments or any(slack.values())  # then plans that fit may be missing
            nearest = Solution(again, outcome.peak_bytes, problem.cost(again, packed), 1.0 if held else proved, packed)
        if outcome.peak_bytes <= limit:
            break
        fresh = _tighten(slack, outcome, aim, moments) and moments
    return nearest


def _positions(problem: Problem) -> Iterable[int]:
    """The highest position of each of `CHUNKS` stretches."""
    edges = np.linspace(0, len(problem.live), CHUNKS + 1, dtype=int)
    return {int(low + np.argmax(problem.live[low:high])) for low, high in zip(edges, edges[1:])
            if low < high}


def _tighten(slack: dict[Point, int], outcome: Outcome, bound: int, moments: bool = False) -> bool:
    """Add the worst point of each stretch above `bound`, or hold it to less; whether all are new. In a burst it is the position
    before which that is, or with `moments` the one in it."""
    worst: dict[int, tuple[int, int]] = {}  # by stretch: excess, place
    stretch = 0
    for place, size in enumerate(outcome.live):
        if size <= bound:
            stretch += 1
        elif size - bound > worst.get(stretch, (0, 0))[0]:
            worst[stretch] = size - bound, place
    points = [(excess, _point(outcome, place) if moments else outcome.at[place]) for excess, place in worst.values()]
    fresh = slack.keys().isdisjoint(point for _, point in points)
    for excess, point in points:
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
