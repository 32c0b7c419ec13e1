"""Which operations to run again and which values to pack: the plan that fits a limit in the least time, and the one with
the smallest peak.

Plans come of an integer program (`integer_program`), of which only some positions are written out. A plan is simulated
exactly (`rematerialization.simulate`), and where it is over the limit that position is added and the program solved again: first
coarsely, to see which positions are missing, then to `GAP`. HiGHS (through scipy) proves the gap of such a program's solution.
Where nothing overflows but the search has ended at its nodes, it gets `MORE`, of fewer decisions; behind plans that overflowed
no more than is left of its `WORK`.

Where the position is there and the chain of recomputations itself is what overflows, a burst, the program is not right about it.
Then plans are looked for in three ways, and the fastest is taken: plans are changed until they fit (`mending`), also one with all
that can run again and, where nothing was found, that with the smallest peak; moments in bursts get rows
(`by_moments`); and positions are held to as much less (or half of it), by a program that aims a little lower (`LESS`) where that
leaves the plan as it is. Large programs are spared the last two where bursts are so much above the limit that each plan has
others (`FUTILE`). None of that is proved, so that the gap is to the bound of positions that are held to nothing. All of it
ends with a plan within `GAP`, or after so much `WORK` with one within `COARSE`; one that is still `FAR_OFF` is changed to faster ones
that are mostly like it (`neighbours`), and gives way to a faster one for a little less. Within `RESOLUTION` of the smallest peak that is all:
the plan with the smallest peak is changed so. What comes out fits by simulation, not by the model.

For the smallest peak the program minimizes that, a large one first coarsely and then with most decisions held to the best plan's. Positions
are added and plans changed in the same way.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from .integer_program import NODES, Point, Program
from .mending import mended
from .neighbours import SHARE, held, improved
from .packing import Packed
from .positions import positions, tighten
from .rematerialization import Problem, fingerprint, simulate

ROUNDS = 24  # of adding positions
PROBES = 6  # of them to find the smallest peak
FEW = 2  # of them beside plans that overflow for another reason
MORE = 10_000_000  # rows times nodes of the search tree, where nothing overflows: four seconds of small programs, up to 16 of large ones
ROOT = 20  # nodes of the search tree that take what its root does
BURST = 0.05  # of the limit: what is above it by more is in a burst, and not at a position that was not written out
LESS = (0, 0.002, 0.005, 0.01, 0.02, 0.04)  # of the limit, by which a program aims lower until a plan fits
FAR = 8  # times a step of these, beyond which it is passed by: so far above the limit is the last plan
WORK = 40000  # rows of all programs that were solved for a limit, after which one within `COARSE` will do: some five seconds
REMEMBERED = 100  # plans: for a refusal up to fifty limits are tried, and the smallest peak is asked for again and again
RESOLUTION = 0.03  # of the smallest peak
LARGE = 3500  # rows of a program, beyond which most decisions are held in those for it
ROUGH = 0.5  # the gap for a first look then
CLOSE = 0.015  # of the program's peak, within which a plan is the smallest
GAP = 0.01
FAR_OFF = 2 * GAP
NEAR = 1.25  # times the smallest peak of the relaxed program
BELOW = (0.01, 0.02, 0.03)  # of the limit, by which a plan that is not as far off may need less
FUTILE = 0.1  # of the limit: where bursts are so much above it each plan has others
LITTLE = WORK / 4  # by which such plans are looked for nonetheless
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
                  lambda: _also_below(problem, limit_bytes, groups, at_most))


def _also_below(problem: Problem, limit: int, groups: Sequence[int], at_most: float) -> Solution | None:
    """What is found for the limit or, as long as that is `FAR_OFF` what is proved and there was not much `WORK`, for a little less if
    it is faster: where bursts overflow it is luck what is found, and a smaller budget had the faster step. Not near the smallest
    peak, where proofs that nothing is faster are dear."""
    search = _Search(problem, limit, groups, at_most)
    plan, work = _cheapest(search), search.work
    if plan is None and at_most < math.inf and search.proved < math.inf and _may_fit(search):
        plan = _cheapest(_Search(problem, limit, groups, math.inf))  # without a bound it may come to one that is within it
        return plan if plan and plan.seconds <= at_most else None
    for less in BELOW:
        below = int(limit * (1 - less))
        if (plan is None or plan.gap <= FAR_OFF or work > 2 * WORK
                or smallest(problem, groups).peak_bytes * (1 + RESOLUTION) > below):
            break
        search = _Search(problem, below, groups, plan.seconds * (1 - GAP))
        if (faster := _cheapest(search)) is None:
            break
        plan, work = replace(faster, gap=_gap(faster.seconds, plan.seconds * (1 - plan.gap))), work + search.work
    return plan


def _may_fit(search: _Search) -> bool:
    """Whether there may be a plan within the search's limit and seconds."""
    problem, groups = search.problem, search.groups
    return Program(problem, groups, search.at_most, strict=True).solve(
        dict.fromkeys(positions(problem), 0), search.limit, FIRST) is not None


def _cheapest(search: _Search) -> Solution | None:
    """In this order: a coarse solution, which says which positions are missing; near the smallest peak the plan with that, changed; a fine
    one; where that fits, more of the search tree, and where it overflows in bursts, rows for their moments and positions held to less;
    what is found, changed."""
    problem, limit, groups, at_most = search.problem, search.limit, search.groups, search.at_most
    model, slack = Program(problem, groups, at_most), dict.fromkeys(positions(problem), 0)
    rough = search.nearest(model, slack, COARSE, 1)
    if rough is None or rough.gap <= GAP and rough.peak_bytes <= limit:
        return search.best
    if search.best is None and (least := search.near()) is not None:
        search.change(least.again, least.packed)
        search.improve(search.best or least)
        return search.best
    slack = dict.fromkeys(slack, 0)
    if rough.peak_bytes > limit * (1 + BURST):
        search.change(frozenset(o for o, operation in enumerate(problem.operations) if operation.again))
        search.any_plan()
        if search.enough(len(model.rows.low)):
            return search.best
    more = max(NODES, MORE // len(model.rows.low))
    if rough.peak_bytes <= limit:
        model.rule_out(slack, limit, rough.again, rough.packed)
    fine = search.nearest(model, slack, GAP, hold=False, nodes=more if rough.peak_bytes <= limit else NODES)
    if fine and fine.peak_bytes <= limit:
        if search.gap > GAP and rough.peak_bytes > limit:
            model.rule_out(slack, limit, search.best.again, search.best.packed)
            left = int((WORK - search.work) * ROOT / len(model.rows.low))  # there is a plan, and proofs are dear
            if left > NODES:
                search.nearest(model, slack, GAP, 1, nodes=min(more, left))
    elif fine and (fine.peak_bytes <= limit * (1 + FUTILE) or search.work < LITTLE):
        search.by_moments(fine)
        if search.gap > GAP:
            search.ladder(model, slack)
        if GAP < search.gap < math.inf and not search.enough():  # by all positions that were found, none held to less
            search.nearest(model, dict.fromkeys(slack, 0), GAP, 1)
    if search.best is None and at_most == math.inf > search.proved and (least := smallest(problem, groups)).peak_bytes <= limit:
        search.change(least.again, least.packed)
    if search.best:
        search.improve(search.best)
    return search.best


@dataclass
class _Search:
    """For the fastest plan within a limit: the `best` so far, the seconds that are `proved` to be needed (infinite: there is
    none), and what was tried."""

    problem: Problem
    limit: int
    groups: Sequence[int]
    at_most: float
    best: Solution | None = None
    proved: float = 0.0
    seen: list[tuple[frozenset[int], Mapping[int, Packed]]] = field(default_factory=list)
    work: float = 0  # of all programs, in rows (`Program.work`)

    @property
    def gap(self) -> float:
        return self.best.gap if self.best else math.inf

    def enough(self, more: float = 0) -> bool:
        """Whether no more work is worth it."""
        return self.work + more > WORK and self.gap <= COARSE

    def any_plan(self) -> None:
        """Of any seconds: what it is changed to may be fast."""
        self.nearest(Program(self.problem, self.groups), dict.fromkeys(positions(self.problem), 0), FIRST, FEW)

    def change(self, again: frozenset[int], packed: Mapping[int, Packed] = MappingProxyType({})) -> None:
        """What these come to that run again, once it fits and all of it is needed."""
        if (changed := mended(self.problem, self.groups, again, packed, self.limit)) is not None:
            self.take(_solution(self.problem, changed, packed))

    def near(self) -> Solution | None:
        """The plan with the smallest peak if the limit is within `RESOLUTION` of that. It takes seconds, so that it is looked for only if the
        limit is `NEAR` what is proved for the smallest peak, and no faster plan is known."""
        if self.at_most < math.inf:
            return None
        model = Program(self.problem, self.groups, strict=True)
        least = model.relaxed(dict.fromkeys(positions(self.problem), 0), None).x
        if least is None or self.limit > NEAR * least[model.peak] * model.unit:
            return None
        plan = smallest(self.problem, self.groups)
        return plan if plan.peak_bytes <= self.limit <= plan.peak_bytes * (1 + RESOLUTION) else None

    def improve(self, plan: Solution) -> None:
        """`plan` is changed to faster ones that are mostly like it, unless what is proved is not `FAR_OFF`."""
        if self.gap > FAR_OFF:
            self.take(_solution(self.problem, *improved(self.problem, self.groups, self.limit, plan.again, plan.packed)))

    def by_moments(self, over: Solution) -> None:
        """Once moments in the bursts of a plan that is `over` the limit have rows, what overflows there is no reason any more to
        hold positions to less. Such rows are of the bursts that one plan has, so that others may be faster."""
        model, slack = Program(self.problem, self.groups, self.at_most, strict=True), dict.fromkeys(positions(self.problem), 0)
        tighten(slack, simulate(self.problem, over.again, over.packed), self.limit, moments=True)
        self.ladder(model, dict.fromkeys(slack, 0), PROBES, moments=True)

    def ladder(self, model: Program, slack: dict[Point, int], rounds: int = ROUNDS, moments: bool = False) -> None:
        """The program aims lower and lower, until a plan fits."""
        excess = 0.0
        for less in LESS:
            if less < excess / FAR:
                continue
            if self.enough():
                return
            plan = self.nearest(model, slack, GAP, rounds, int(self.limit * (1 - less)), moments=moments)
            if plan is None or plan.peak_bytes <= self.limit:
                return
            excess = plan.peak_bytes / self.limit - 1

    def nearest(self, model: Program, slack: dict[Point, int], gap: float, rounds: int = ROUNDS, aim: int | None = None, *,
                hold: bool = True, moments: bool = False, nodes: int = NODES) -> Solution | None:
        """Solve, simulate and add positions to `slack` until the plan fits; else the plan that came nearest
        to it, None if not even the program has one. It ends where a plan comes out again: what overflows is in no row; or, unless
        it may `hold` positions to less, where one has to be.
        Positions that are held to so much less that nothing is left are held to half as much less, once. The program's limit
        is `aim`, if that is given; with `moments` what overflows in a burst gets a row, and then nothing is proved."""
        problem, nearest, aim, last = self.problem, None, self.limit if aim is None else aim, None
        halved = fresh = False
        for _ in range(rounds):
            before = model.work
            solved = model.solve(slack, aim, gap, nodes)
            self.work += model.work - before
            if solved is None and not halved and any(slack.values()):
                halved = True
                slack.update((position, less // 2) for position, less in slack.items())
                continue
            if solved is None and model.infeasible and not (moments or aim < self.limit or any(slack.values())):
                self.proved = math.inf  # there is no plan
            if solved is None or last and solved[:2] == last[:2] and not fresh:
                break
            last = solved
            again, packed, proved, _ = solved
            outcome, seconds = simulate(problem, again, packed), problem.cost(again, packed)
            held = moments or aim < self.limit or any(slack.values())  # then plans that fit may be missing
            if not held:
                self.proved = max(self.proved, seconds * (1 - proved))
            if nearest is None or outcome.peak_bytes < nearest.peak_bytes:
                nearest = Solution(again, outcome.peak_bytes, seconds, 1.0 if held else proved, packed)
            if outcome.peak_bytes <= self.limit:
                break
            new = tighten(slack, outcome, aim, moments)
            if not (new or hold):
                break
            fresh = new and moments
            if self.enough():
                break
        if nearest:
            self.take(nearest)
        return nearest

    def take(self, found: Solution) -> None:
        """It may be the best, as it is or changed until it fits."""
        best = self.best
        if (found.again, found.packed) not in self.seen:
            self.seen.append((found.again, found.packed))
            plan = _mended(self.problem, self.groups, found, self.limit)
            if plan and plan.seconds <= self.at_most and (best is None or plan.seconds < best.seconds):
                best = plan
        self.best = best and replace(best, gap=_gap(best.seconds, self.proved))


def _mended(problem: Problem, groups: Sequence[int], plan: Solution, limit: int) -> Solution | None:
    """`plan`, changed until it fits."""
    if plan.peak_bytes <= limit:
        return plan
    again = mended(problem, groups, plan.again, plan.packed, limit)
    return None if again is None else _solution(problem, again, plan.packed)


def _solution(problem: Problem, again: frozenset[int], packed: Mapping[int, Packed]) -> Solution:
    """It proves nothing."""
    return Solution(again, simulate(problem, again, packed).peak_bytes, problem.cost(again, packed), 1.0, packed)


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
    """The choice with the smallest transient peak that was found. Nothing of it is proved (a gap of 1)."""
    return _known(("smallest",), problem, groups, lambda: _smallest(problem, groups))  # type: ignore[return-value]


def _smallest(problem: Problem, groups: Sequence[int]) -> Solution:
    """Where programs are large a coarse solution, and then those that are mostly like the best plan: all decisions at once take twice
    as long, and come to the same peaks."""
    best = Solution(frozenset(), max(problem.live, default=0), 0.0, 0.0)
    model, slack, chance = Program(problem, groups, strict=True), dict.fromkeys(positions(problem), 0), random.Random(0)
    gap = ROUGH if (large := model.size(slack) > LARGE) else RESOLUTION
    for _ in range(PROBES):
        solved = model.solve(slack, None, gap)
        if solved is None:
            break
        again, packed, proved, aim = solved
        outcome, found = simulate(problem, again, packed), _solution(problem, again, packed)
        within = min(int((aim * found.peak_bytes) ** 0.5), best.peak_bytes - 1)  # halfway to what the program has
        best = min(best, _mended(problem, groups, found, within) or found, key=lambda plan: plan.peak_bytes)
        if best.peak_bytes <= aim * (1 + CLOSE) and (gap == RESOLUTION or proved <= RESOLUTION):
            break
        tighten(slack, outcome, aim)
        gap = RESOLUTION
        if large and (relaxed := model.relaxed(slack, None).x) is not None:
            model.out, model.last = held(model, (best.again, best.packed), relaxed, SHARE, chance), None
    return best
