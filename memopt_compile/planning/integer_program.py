"""The integer program of `planner`: which operations to run again and which values to pack, so that a step's peak
fits a limit in the least time.

Let a step have operations o (in forward) that make values v of s_v bytes, and positions p of its
schedule. Value v is read in forward for the last time at e_v, in backward from f_v to l_v. A format f
keeps it in s_vf bytes.

    r_o ∈ {0, 1}    o runs again in backward, right before its first reader there
    c_vf ∈ {0, 1}   v is packed in format f, from e_v to its first reader in backward
    k_v ∈ {0, 1}    v is kept from e_v on
    a_op ∈ [0, 1]   o has run again by position p, for the sake of another that has
    b_vp ∈ [0, 1]   v is back by position p for such an one (where v may be packed)
    d_v ∈ [0, 1]    what backward has of v differs from what forward made

    minimize    Σ_o seconds_o · r_o + Σ_vf seconds_vf · c_vf                       (`_objective`)
    subject to  k_v + r_o + Σ_f c_vf ≥ 1   o makes v, and backward reads v         (`_available`)
                k_u + r_o + Σ_f c_uf ≥ r_x x reads u, which o makes; f that restore (`_available`)
                k_v + Σ_f c_vf ≤ 1,  r_o + Σ_f c_vf ≤ 1                            (`_available`)
                k_v + r_o + Σ_f c_vf ≤ 1   if `strict`                             (`_available`)
                a_op ≥ a_xp − k_u          x reads u, which o makes; a_xp is r_x   (`_chains`)
                                           once backward has read a result of x
                b_up ≥ a_xp − k_u,  a_op ≥ b_up − Σ_f c_uf    the same of a u that may be packed
                Σ_v s_v · (k_v + (a_op or b_vp)) + Σ_vf s_vf · c_vf + fixed_p ≤ limit   (`_fits`)
                d_v ≥ Σ_f c_vf             f that are lossy                        (`_differences`)
                d_v ≥ d_u + r_o − 1        o makes v of u, or may not (`sensitivity`): 0 ≥ ..
                d_v = 0                    where backward needs v exactly
                d_v ≤ r_o                  where o has to run together with any change of v

where at p the sum goes over the values in their gap, e_v < p < f_v, and fixed_p has what is alive
there whatever is chosen. What runs again right before p is a burst, with values in its midst of which backward reads
nothing. A row for a `Moment` of it, when x runs again, has those too:

    i_v ≥ a_yp − k_v           y reads v in the burst, x itself or later; x or an earlier one makes it (`_in_between`)
    Σ_v s_v · (k_v + (a_op or b_vp)) + Σ_v s_v · i_v + Σ_vf s_vf · c_vf + fixed_x ≤ limit   but for o later in the burst

with the order of the burst that a plan has shown, and as if nothing in it could have run again before. A plan with another
burst may need less, so that such rows guide and nothing is proved by them.

r_o = 0 where o may not run again (random numbers, collectives, reads of
what is overwritten). The linear program bounds well: memory at p is at least max(k_u, a_xp).

Equal layers share decisions, in groups of halving size, so that any number of layers can have
them and the program compiles few distinct pieces. Each of the k, a, b and d is the least that its rows ask for; so one
of them is all that have the same rows (`_least`), as the values of equal layers do, and chains at as many layers from
where they begin.

Only those positions are written out for which `solve` has a slack. Once a plan is known, decisions that no faster one can
have (`rule_out`, by reduced costs) are taken out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..progress import stage
from .packing import Packed
from .rematerialization import NEVER, Problem, carried, latest_runs
from .rows import Rows, Solved, Terms, silent

NODES = 100  # of the search tree for one solution
PEAK_NODES = 50  # the same for the smallest peak, of which good solutions come early
SECONDS = 120.0  # for one solution, should nodes take long
INFEASIBLE = 2  # as scipy has it
PEAK_SHARE = 1e-6  # of a plan's cost, within a limit
TINY = 1e-6  # of the peak: smaller values count as alive


@dataclass(frozen=True)
class Moment:
    """In a burst of what runs again right before `position`, that at which `operation` does: behind those that ran
    `earlier` in it and before those `later`."""

    position: int
    operation: int
    earlier: frozenset[int]
    later: frozenset[int]


Point = int | Moment


class Program:
    """The variables: an r for each group that may run again, a c for each group and format, a k for
    each value, a d for each if any format is lossy; the peak; and an a or b for each operation or
    value and position that a chain can reach. `strict` programs know that what runs again is not kept, bound the smallest
    peak better and need that for moments; within a limit, plans that were changed beside bursts come out of the others."""

    def __init__(self, problem: Problem, groups: Sequence[int], at_most: float = math.inf, strict: bool = False):
        self.problem, self.strict = problem, strict
        self.columns: dict[Any, int] = {}  # by what the variable is, or the rows that it is the least for
        # The variable r of each operation; None if it may not run again.
        self.run = [self._column("again", g) if o.again else None
                    for g, o in zip(groups, problem.operations)]
        self.pack: list[dict[int, Packed]] = [{} for _ in problem.values]  # by variable c
        for g, o in zip(groups, problem.operations):
            for place, v in enumerate(o.makes):
                self.pack[v] = {self._column("pack", g, place, p.form): p for p in problem.values[v].packed}
        self.unit = float(max(problem.live, default=1) or 1)  # bytes
        self.first = [min((problem.values[v].first for v in o.makes), default=NEVER)
                      for o in problem.operations]
        self.readers: list[list[int]] = [[] for _ in problem.values]  # that may run again
        for x, operation in enumerate(problem.operations):
            if self.run[x] is not None:
                for u in operation.reads:
                    self.readers[u].append(x)
        self.rows = Rows()
        self.kept: list[int | None] = []  # the variable k of each value; None if no row asks for it
        self._available()
        if any(p.lossy for ways in self.pack for p in ways.values()):
            self._differences()
        self.peak = self._column("peak")
        self.chains: dict[tuple[str, int, int], int] = {}  # the variables a and b
        self.chained: set[int] = set()  # positions for which these are written out
        self.fits: dict[Point, int] = {}  # the row of each point that is written out
        self.out: dict[int, int] = {}  # decisions, and what they are in every plan that is wanted
        self.last: Solved | None = None
        self.infeasible = False  # the last that was asked, as HiGHS proved
        self.work = 0.0  # rows that were solved, twice those of `NODES` nodes
        self.total = sum(o.seconds for o in problem.operations) or 1.0
        self.bound: int | None = None  # the row of seconds
        if at_most < math.inf:
            self.faster_than(at_most)
        latest = latest_runs(problem.values, problem.operations)
        # For each value, the last position at which what reads it can run again.
        self.until = [max((latest[x] for x in readers), default=-1) for readers in self.readers]

    def _column(self, *key: Any) -> int:
        return self.columns.setdefault(key, len(self.columns))

    def _least(self, rows: Iterable[tuple[float, Terms]]) -> int | None:
        """The variable that is as small as these `rows` (low, terms) let it be: itself + terms ≥ low. None if it can be 0."""
        if not (rows := dict.fromkeys(rows)):
            return None
        if (key := frozenset(rows)) not in self.columns:
            self.columns[key] = len(self.columns)
            for low, terms in rows:
                self.rows.add(low, ((1, self.columns[key]), *terms))
        return self.columns[key]

    def solve(self, slack: dict[Point, int], limit: int | None, gap: float, nodes: int = NODES
              ) -> tuple[frozenset[int], dict[int, Packed], float, int] | None:
        """(operations to run again, values to pack, gap, modelled peak bytes), or None if nothing fits.

        Without a `limit` the peak is minimized.
        """
        # Half a second, of steps with a budget only.
        from scipy.optimize import Bounds, LinearConstraint, milp

        cost, least, most, rows, low = self._written(slack, limit)
        for column, value in self.out.items():
            least[column] = most[column] = value
        if self.last and self.last.holds(gap, nodes, cost, most, rows, low):
            return self.last.plan
        integral = np.zeros(len(cost))
        integral[:self.peak] = 1
        tree = PEAK_NODES if limit is None else nodes
        with stage(f"an integer program of {len(low):,} rows"), silent():
            found = milp(cost, integrality=integral, bounds=Bounds(least, most), constraints=LinearConstraint(rows, lb=low),
                         options={"mip_rel_gap": gap, "node_limit": tree, "time_limit": SECONDS})
        self.infeasible = found.status == INFEASIBLE
        searched = 0 if self.infeasible else tree if found.x is None else found.mip_node_count or 0  # told with a solution
        self.work += len(low) * (1 + searched / NODES)
        if found.x is None:
            return None
        chosen = {i for i in range(self.peak) if found.x[i] > 0.5}
        again = frozenset(o for o, r in enumerate(self.run) if r in chosen)
        packed = {v: p for v, ways in enumerate(self.pack) for c, p in ways.items() if c in chosen}
        plan = again, packed, float(found.mip_gap or 0.0), int(found.x[self.peak] * self.unit)
        self.last = Solved(plan, found.x, self.peak, gap, nodes, cost, most, low)
        return plan

    def size(self, slack: dict[Point, int]) -> int:
        """Its rows with the points of `slack`."""
        return len(self._written(slack, None)[-1])

    def faster_than(self, seconds: float) -> None:
        """Of plans that take as long at most."""
        if self.bound is None:
            self.bound = len(self.rows.low)
            self.rows.add(0, ((-share, column) for share, column in self._shares()))
        self.rows.low[self.bound] = -seconds / self.total

    def decisions(self, again: Collection[int], packed: Mapping[int, Packed]) -> dict[int, int]:
        """What each r and c is in this plan."""
        runs = {r: int(o in again) for o, r in enumerate(self.run) if r is not None}
        forms = {v: p.form for v, p in packed.items()}
        return runs | {c: int(forms.get(v) == p.form) for v, ways in enumerate(self.pack) for c, p in ways.items()}

    def relaxed(self, slack: dict[Point, int], limit: int | None) -> Any:
        """The solution of the linear program, of which fractions are allowed."""
        from scipy.optimize import linprog

        cost, least, most, rows, low = self._written(slack, limit)
        with silent():
            return linprog(cost, -rows, -low, bounds=np.stack([least, most], axis=1))

    def rule_out(self, slack: dict[Point, int], limit: int, again: frozenset[int], packed: Mapping[int, Packed]) -> None:
        """This plan fits `limit`. Decide what no faster one decides otherwise: with reduced
        costs at least as large as that plan's distance from the relaxed program's optimum."""
        if (relaxed := self.relaxed(slack, limit)).x is None:
            return
        known = (self.problem.cost(again, packed) / self.total + TINY * sum(p.error for p in packed.values())
                 + PEAK_SHARE * limit / self.unit)
        for column in range(self.peak):
            if relaxed.lower.marginals[column] > known - relaxed.fun:
                self.out[column] = 0
            elif -relaxed.upper.marginals[column] > known - relaxed.fun:
                self.out[column] = 1

    def _written(self, slack: dict[Point, int], limit: int | None) -> tuple[Any, ...]:
        """(cost, least and most of each column, rows, their lower bounds) with the positions of `slack`."""
        for point in slack:
            if point not in self.fits:
                self._fits(point)
        low = np.array(self.rows.low)
        for point, less in slack.items():
            low[self.fits[point]] += less / self.unit
        columns = len(self.columns)
        cost, most = np.zeros(columns), np.ones(columns)
        most[self.peak] = np.inf if limit is None else limit / self.unit
        self._objective(cost, limit is None)
        return cost, np.zeros(columns), most, self.rows.matrix(columns), low

    def _shares(self) -> Iterator[tuple[float, int]]:
        """The seconds of each r and c, as a share of those of all operations; once for each operation."""
        for operation, r in zip(self.problem.operations, self.run):
            if r is not None:
                yield operation.seconds / self.total, r
        for ways in self.pack:
            for c, packed in ways.items():
                yield packed.seconds / self.total, c

    def _objective(self, cost: np.ndarray, for_peak: bool) -> None:
        """Seconds, as a share of all; or the peak, and seconds only where peaks are equal. Of formats
        that are equal in this the one with the smaller error is taken."""
        weight = 1e-4 if for_peak else 1.0
        for share, column in self._shares():
            cost[column] += share * weight
        for ways in self.pack:
            for c, packed in ways.items():
                cost[c] += TINY * packed.error * weight
        cost[self.peak] = 1.0 if for_peak else PEAK_SHARE

    def _available(self) -> None:
        for v, value in enumerate(self.problem.values):
            made, packed = self._term(value.operation), tuple((1.0, c) for c in self.pack[v])
            restored = tuple((1.0, c) for c, p in self.pack[v].items() if p.restores)
            rows = [(1.0, (*made, *packed))] if value.needed else []
            rows += [(0.0, (*made, *restored, (-1.0, self.run[x]))) for x in self.readers[v]]
            self.kept.append(k := self._least(rows))
            kept: Terms = () if k is None else ((1.0, k),)
            if self.strict and made:
                self._at_most_one(*kept, *made, *packed)
            elif packed:
                self._at_most_one(*kept, *packed)
                self._at_most_one(*made, *packed)

    def _at_most_one(self, *terms: tuple[float, int]) -> None:
        self.rows.once(-1, ((-factor, column) for factor, column in terms))

    def _term(self, operation: int) -> Terms:
        r = self.run[operation]
        return () if r is None else ((1.0, r),)

    def _differences(self) -> None:
        differs: list[int | None] = [None] * len(self.problem.values)  # the variable d of each value; None if it cannot differ
        for o, operation in enumerate(self.problem.operations):
            r = self.run[o]
            by = [(-1.0, ((-1.0, differs[u]), (-1.0, r))) for u in operation.reads if differs[u] is not None and r is not None]
            for v in operation.makes:
                lossy = tuple((-1.0, c) for c, p in self.pack[v].items() if p.lossy)
                differs[v] = d = self._least([*by, *([(0.0, lossy)] if lossy else [])])
                if d is not None and self.problem.values[v].exact:
                    self.rows.once(0, [(-1.0, d)])
            for u in operation.exact:
                if differs[u] is not None and r is not None:
                    self._at_most_one((1.0, differs[u]), (1.0, r))
        for v, o in self.problem.together:
            if differs[v] is not None:
                self.rows.once(0, [*self._term(o), (-1.0, differs[v])])

    def _chains(self, position: int) -> None:
        """Operations that have run again by `position` because another has, last ones first."""
        if position in self.chained:
            return
        self.chained.add(position)
        for o in range(len(self.problem.operations) - 1, -1, -1):
            operation = self.problem.operations[o]
            runs = self.run[o] is not None and self.first[o] > position
            if operation.position > position:
                continue
            asked: list[tuple[float, Terms]] = []  # rows of a
            for u in operation.makes:
                if not (runs or self.pack[u] and self.problem.values[u].first > position):
                    continue
                rows = [(0.0, ((1.0, self.kept[u]), (-1.0, b)))
                        for x in self.readers[u] if (b := self._by(x, position)) is not None]
                if rows and self.pack[u]:
                    self.chains["back", u, position] = back = self._least(rows)
                    rows = [(0.0, ((-1.0, back), *((1.0, c) for c in self.pack[u])))]
                asked += rows
            if runs and asked:
                self.chains["again", o, position] = self._least(asked)

    def _by(self, x: int, position: int) -> int | None:
        """The variable that says whether x has run again by `position`; None if it cannot have."""
        if self.first[x] <= position:
            return self.run[x]
        return self.chains.get(("again", x, position))

    @functools.cached_property
    def _carried(self) -> list[int]:
        return carried(self.problem)

    def _fits(self, point: Point) -> None:
        terms: list[tuple[float, int]] = [(1.0, self.peak)]
        moment = point if isinstance(point, Moment) else None
        position = moment.position if moment else point
        self._chains(position)
        fixed, behind = (self._carried[position], position - 1) if moment else (self.problem.live[position], position)
        for v, value in enumerate(self.problem.values):
            size, packed = value.nbytes / self.unit, self.pack[v]
            if size < TINY or value.last > position:
                continue
            in_gap = value.needed and behind < value.first
            if value.last < position:
                if in_gap:
                    if self.run[value.operation] is None and not packed:
                        continue  # alive as it is
                    fixed -= value.nbytes
                    terms.append((-size, self.kept[v]))
                    chain = self.chains.get(("back", v, position)) if packed else self._by(value.operation, position)
                    if chain is not None and not (moment and value.operation in moment.later):
                        terms.append((-size, chain))
                elif position <= self.until[v] and (not value.needed or value.final < position):
                    terms.append((-size, self.kept[v]))  # only as an operand of what runs again
            if in_gap or not value.needed and position <= self.until[v]:
                terms += [(-p.nbytes / self.unit, c) for c, p in packed.items()]
        if moment:
            terms += self._in_between(moment)
        self.fits[point] = len(self.rows.low)
        self.rows.add(fixed / self.unit, terms)

    def _in_between(self, moment: Moment) -> Iterator[tuple[float, int]]:
        """What is there for the burst alone: values of which backward reads nothing from there on."""
        o, problem = moment.operation, self.problem

        def ran(x: int) -> Terms:
            column = self._by(x, moment.position)
            return () if column is None else ((-1.0, column),)

        yield from ((factor * problem.workspace(problem.operations[o].node) / self.unit, column) for factor, column in ran(o))
        for v, value in enumerate(problem.values):
            readers = [x for x in self.readers[v] if x == o or x in moment.later]
            makes = value.operation == o
            if (value.needed and value.final >= moment.position or self.pack[v]
                    or not (makes or value.operation in moment.earlier or o in readers)):
                continue
            kept: Terms = () if self.kept[v] is None else ((1.0, self.kept[v]),)
            rows = [(0.0, (*kept, *ran(x))) for x in readers if ran(x)] + [(0.0, ran(o))] * (makes and ran(o) != ())
            if (there := self._least(rows)) is not None:
                yield -value.nbytes / self.unit, there
