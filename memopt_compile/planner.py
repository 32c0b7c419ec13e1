"""Which operations to run again, so that a step's peak fits a limit in the least time: a MILP.

Let a step have operations o (in forward) that make values v of s_v bytes, and positions p of its
schedule. Value v is read in forward for the last time at e_v, in backward from f_v to l_v.

    r_o ∈ {0, 1}    o runs again in backward, right before its first reader there
    k_v ∈ {0, 1}    v is kept from e_v on
    a_op ∈ [0, 1]   o has run again by position p, for the sake of another that has

    minimize    Σ_o seconds_o · r_o                                               (`_objective`)
    subject to  k_v + r_o ≥ 1              o makes v, and backward reads v         (`_available`)
                k_u + r_o ≥ r_x            x reads u, which o makes                (`_available`)
                a_op ≥ a_xp − k_u          x reads u, which o makes; a_xp is r_x   (`_chains`)
                                           once backward has read a result of x
                Σ_v s_v · (k_v + a_op) + fixed_p ≤ limit                           (`_fits`)

where at p the sum goes over the values in their gap, e_v < p < f_v, and fixed_p has what is alive
there whatever is chosen. r_o = 0 where o may not run again (random numbers, collectives, reads of
what is overwritten). The linear program bounds well: memory at p is at least max(k_u, a_xp).

Equal layers share decisions, in groups of halving size, so that any number of layers can have
them, the program compiles few distinct pieces, and depth costs the solver nothing.

Only some positions are written out. A plan is simulated exactly (`rematerialization.simulate`); where
it is over the limit that position is added, or, if it is there and the chain of recomputations
itself is what overflows, held to as much less; then it is solved again. What comes out fits by
simulation, not by the model. HiGHS (through scipy) proves the gap of its last solution.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array

from .rematerialization import NEVER, Problem, latest_runs, simulate

CHUNKS = 40  # stretches of the schedule that get a position each to begin with
ROUNDS = 24  # of adding positions
RESOLUTION = 0.02  # of the smallest peak
GAP = 0.005
SECONDS = 10.0  # for one solution
TINY = 1e-6  # of the peak: smaller values count as alive


@dataclass(frozen=True)
class Solution:
    """Operations that run `again`; the transient `peak_bytes` by simulation; their `seconds`;
    and the share by which fewer might do, as HiGHS proved it (`gap`) for its program."""

    again: frozenset[int]
    peak_bytes: int
    seconds: float
    gap: float


def cheapest(problem: Problem, limit_bytes: int, groups: Sequence[int]) -> Solution | None:
    """The fastest choice with a transient peak of at most `limit_bytes`; None if none was found.

    `groups` has a number for each operation: those of one number are decided together.
    """
    if max(problem.live, default=0) <= limit_bytes:
        return Solution(frozenset(), max(problem.live, default=0), 0.0, 0.0)
    return _cheapest(_Model(problem, groups), limit_bytes)


def smallest(problem: Problem, groups: Sequence[int]) -> Solution:
    """The choice with the smallest transient peak that was found, to `RESOLUTION`.

    The relaxed program bounds it from below; between that and the best so far limits are tried, the
    low ones first.
    """
    best = Solution(frozenset(), max(problem.live, default=0), 0.0, 0.0)
    model = _Model(problem, groups)
    relaxed = model.solve(dict.fromkeys(_positions(problem), 0), None, relaxed=True)
    low = relaxed[2] if relaxed else 0
    while best.peak_bytes - low > RESOLUTION * best.peak_bytes:
        middle = min((low + best.peak_bytes) // 2, int(1.1 * low) + 1)
        found = _cheapest(model, middle)
        if found is None:
            low = middle
        else:
            best = found
    return best


def _cheapest(model: _Model, limit: int) -> Solution | None:
    """Solve, simulate and add positions until the plan fits."""
    problem = model.problem
    slack: dict[int, int] = dict.fromkeys(_positions(problem), 0)
    for _ in range(ROUNDS):
        solved = model.solve(slack, limit)
        if solved is None:
            return None
        again, gap, _ = solved
        outcome = simulate(problem, again)
        if outcome.peak_bytes <= limit:
            return Solution(again, outcome.peak_bytes, problem.cost(again), gap)
        _tighten(slack, outcome.live, outcome.at, limit)
    return None


def _positions(problem: Problem) -> Iterable[int]:
    """The highest position of each of `CHUNKS` stretches."""
    edges = np.linspace(0, len(problem.live), CHUNKS + 1, dtype=int)
    return {int(low + np.argmax(problem.live[low:high])) for low, high in zip(edges, edges[1:])
            if low < high}


def _tighten(slack: dict[int, int], live: Sequence[int], at: Sequence[int], bound: int) -> None:
    """Add the worst position of each stretch above `bound`, or hold it to less."""
    worst: dict[int, tuple[int, int]] = {}  # by stretch: excess, position
    stretch = 0
    for size, position in zip(live, at):
        if size <= bound:
            stretch += 1
        elif size - bound > worst.get(stretch, (0, 0))[0]:
            worst[stretch] = size - bound, position
    for excess, position in worst.values():
        slack[position] = slack[position] + excess if position in slack else 0


@dataclass
class _Rows:
    """Rows of a sparse matrix A with lower bounds: A x ≥ low."""

    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    entry: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)

    def add(self, low: float, terms: Iterable[tuple[float, int]]) -> None:
        for entry, column in terms:
            self.row.append(len(self.low))
            self.column.append(column)
            self.entry.append(entry)
        self.low.append(low)

    def matrix(self, columns: int) -> csr_array:
        return coo_array((self.entry, (self.row, self.column)),
                         shape=(len(self.low), columns)).tocsr()


class _Model:
    """The variables: one r for each group that may run again, one k for each value, one a for
    each operation and position that a chain can reach, and the peak."""

    def __init__(self, problem: Problem, groups: Sequence[int]):
        self.problem = problem
        free = {g for g, o in zip(groups, problem.operations) if o.again}
        numbers = {g: i for i, g in enumerate(sorted(free))}
        # The variable r of each operation; None if it may not run again.
        self.run = [numbers[g] if o.again else None for g, o in zip(groups, problem.operations)]
        self.decisions = len(numbers)
        self.kept = self.decisions  # the variable k of value 0
        self.peak = self.kept + len(problem.values)
        self.unit = float(max(problem.live, default=1) or 1)  # bytes
        self.first = [min((problem.values[v].first for v in o.makes), default=NEVER)
                      for o in problem.operations]
        self.readers: list[list[int]] = [[] for _ in problem.values]  # that may run again
        for x, operation in enumerate(problem.operations):
            if self.run[x] is not None:
                for u in operation.reads:
                    self.readers[u].append(x)
        self.rows = _Rows()
        self.chains: dict[tuple[int, int], int] = {}  # the variables a
        self.fits: dict[int, int] = {}  # the row of each position that is written out
        self._available()
        latest = latest_runs(problem.values, problem.operations)
        # For each value, the last position at which what reads it can run again.
        self.until = [max((latest[x] for x in readers), default=-1) for readers in self.readers]

    def solve(self, slack: dict[int, int], limit: int | None,
              relaxed: bool = False) -> tuple[frozenset[int], float, int] | None:
        """(operations to run again, gap, modelled peak bytes), or None if nothing fits.

        Without a `limit` the peak is minimized; `relaxed` allows fractions of decisions.
        """
        for position in slack:
            if position not in self.fits:
                self._chains(position)
                self._fits(position)
        low = np.array(self.rows.low)
        for position, less in slack.items():
            low[self.fits[position]] += less / self.unit
        columns = self.peak + 1 + len(self.chains)
        cost, upper, integral = np.zeros(columns), np.ones(columns), np.zeros(columns)
        integral[:self.peak] = not relaxed  # k too, or HiGHS repairs its solutions and prints so
        upper[self.peak] = np.inf if limit is None else limit / self.unit
        self._objective(cost, limit is None)
        found = milp(cost, integrality=integral, bounds=Bounds(0, upper),
                     constraints=LinearConstraint(self.rows.matrix(columns), lb=low),
                     options={"mip_rel_gap": GAP, "time_limit": SECONDS})
        if found.x is None:
            return None
        chosen = {i for i in range(self.decisions) if found.x[i] > 0.5}
        again = frozenset(o for o, r in enumerate(self.run) if r in chosen)
        return again, float(found.mip_gap or 0.0), int(found.x[self.peak] * self.unit)

    def _objective(self, cost: np.ndarray, for_peak: bool) -> None:
        """Seconds, as a share of all; or the peak, and seconds only where peaks are equal."""
        total = sum(o.seconds for o in self.problem.operations) or 1.0
        for operation, r in zip(self.problem.operations, self.run):
            if r is not None:
                cost[r] += operation.seconds / total * (1e-4 if for_peak else 1.0)
        cost[self.peak] = 1.0 if for_peak else 1e-6

    def _available(self) -> None:
        for v, value in enumerate(self.problem.values):
            made = self._term(value.operation)
            if value.needed:
                self.rows.add(1, [(1, self.kept + v), *made])
            for x in self.readers[v]:
                self.rows.add(0, [(1, self.kept + v), *made, (-1, self.run[x])])

    def _term(self, operation: int) -> list[tuple[float, int]]:
        r = self.run[operation]
        return [] if r is None else [(1, r)]

    def _chains(self, position: int) -> None:
        """Operations that have run again by `position` because another has, last ones first."""
        for o in range(len(self.problem.operations) - 1, -1, -1):
            operation = self.problem.operations[o]
            if self.run[o] is None or self.first[o] <= position or operation.position > position:
                continue
            for u in operation.makes:
                for x in self.readers[u]:
                    by = self._by(x, position)
                    if by is not None:
                        a = self.chains.setdefault((o, position), self.peak + 1 + len(self.chains))
                        self.rows.add(0, [(1, a), (1, self.kept + u), (-1, by)])

    def _by(self, x: int, position: int) -> int | None:
        """The variable that says whether x has run again by `position`; None if it cannot have."""
        return self.run[x] if self.first[x] <= position else self.chains.get((x, position))

    def _fits(self, position: int) -> None:
        terms: list[tuple[float, int]] = [(1.0, self.peak)]
        fixed = self.problem.live[position]
        for v, value in enumerate(self.problem.values):
            size = value.nbytes / self.unit
            if size < TINY or value.last >= position:
                continue
            if value.needed and position < value.first:  # in its gap
                if self.run[value.operation] is None:
                    continue  # alive as it is
                fixed -= value.nbytes
                terms.append((-size, self.kept + v))
                if (a := self.chains.get((value.operation, position))) is not None:
                    terms.append((-size, a))
            elif not value.needed and position <= self.until[v]:  # only others' operand
                terms.append((-size, self.kept + v))
            elif value.needed and value.final < position <= self.until[v]:  # operand of late ones
                terms.append((-size, self.kept + v))
        self.fits[position] = len(self.rows.low)
        self.rows.add(fixed / self.unit, terms)
