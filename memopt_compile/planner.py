"""Which operations to run again and which values to pack, so that a step's peak fits a limit in the
least time: a MILP.

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
                a_op ≥ a_xp − k_u          x reads u, which o makes; a_xp is r_x   (`_chains`)
                                           once backward has read a result of x
                b_up ≥ a_xp − k_u,  a_op ≥ b_up − Σ_f c_uf    the same of a u that may be packed
                Σ_v s_v · (k_v + (a_op or b_vp)) + Σ_vf s_vf · c_vf + fixed_p ≤ limit   (`_fits`)
                d_v ≥ Σ_f c_vf             f that are lossy                        (`_differences`)
                d_v ≥ d_u + r_o − 1        o makes v of u, or may not (`sensitivity`): 0 ≥ ..
                d_v = 0                    where backward needs v exactly
                d_v ≤ r_o                  where o has to run together with any change of v

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

import contextlib
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .packing import Packed
from .rematerialization import NEVER, Problem, latest_runs, simulate

CHUNKS = 40  # stretches of the schedule that get a position each to begin with
ROUNDS = 24  # of adding positions
PROBES = 6  # of them to find out whether a limit can be kept at all
RESOLUTION = 0.03  # of the smallest peak
GAP = 0.005
COARSE = 0.1  # the gap for a first look
FIRST = 1.0  # the same if any solution will do, as for the smallest peak: proving one to be fast takes most of the time
NODES = 100  # of the search tree for one solution
SECONDS = 120.0  # for one solution, should nodes take long
TINY = 1e-6  # of the peak: smaller values count as alive


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
    model, slack = _Model(problem, groups, at_most), dict.fromkeys(_positions(problem), 0)
    rough = _nearest(model, limit_bytes, slack, COARSE, 1)  # it is to say which positions are missing
    if rough is None or rough.gap <= GAP and rough.peak_bytes <= limit_bytes:
        return rough
    fine = _nearest(model, limit_bytes, slack, GAP)
    return next((each for each in (fine, rough) if each and each.peak_bytes <= limit_bytes), None)


def smallest(problem: Problem, groups: Sequence[int]) -> Solution:
    """The choice with the smallest transient peak that was found, to `RESOLUTION`.

    The relaxed program bounds it from below; between that and the best so far limits are tried, the
    low ones first.
    """
    best = Solution(frozenset(), max(problem.live, default=0), 0.0, 0.0)
    model = _Model(problem, groups)
    relaxed = model.solve(dict.fromkeys(_positions(problem), 0), None, GAP, relaxed=True)
    low = relaxed[3] if relaxed else 0
    while best.peak_bytes - low > RESOLUTION * best.peak_bytes:
        middle = min(int((low * best.peak_bytes) ** 0.5), int(1.25 * low)) + 1
        found = _nearest(model, middle, dict.fromkeys(_positions(problem), 0), FIRST, PROBES)
        if found is None or found.peak_bytes > middle:
            low = middle
        if found and found.peak_bytes < best.peak_bytes:
            best = found
    return best


def _nearest(model: _Model, limit: int, slack: dict[int, int], gap: float,
             rounds: int = ROUNDS) -> Solution | None:
    """Solve, simulate and add positions to `slack` until the plan fits; else the plan that came nearest
    to it, None if not even the program has one."""
    problem, nearest = model.problem, None
    for _ in range(rounds):
        solved = model.solve(slack, limit, gap)
        if solved is None:
            break
        again, packed, proved, _ = solved
        outcome = simulate(problem, again, packed)
        if nearest is None or outcome.peak_bytes < nearest.peak_bytes:
            nearest = Solution(again, outcome.peak_bytes, problem.cost(again, packed), proved, packed)
        if outcome.peak_bytes <= limit:
            break
        _tighten(slack, outcome.live, outcome.at, limit)
    return nearest


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


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """HiGHS tells the process's output, past Python, when it has to repair a solution."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


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

    def matrix(self, columns: int) -> Any:
        from scipy.sparse import coo_array

        return coo_array((self.entry, (self.row, self.column)),
                         shape=(len(self.low), columns)).tocsr()


class _Model:
    """The variables: an r for each group that may run again, a c for each group and format, a k for
    each value, a d for each if any format is lossy; the peak; and an a or b for each operation or
    value and position that a chain can reach."""

    def __init__(self, problem: Problem, groups: Sequence[int], at_most: float = math.inf):
        self.problem = problem
        columns: dict[Any, int] = {}

        def column(*key: Any) -> int:
            return columns.setdefault(key, len(columns))

        # The variable r of each operation; None if it may not run again.
        self.run = [column("again", g) if o.again else None
                    for g, o in zip(groups, problem.operations)]
        self.pack: list[dict[int, Packed]] = [{} for _ in problem.values]  # by variable c
        for g, o in zip(groups, problem.operations):
            for place, v in enumerate(o.makes):
                self.pack[v] = {column("pack", g, place, p.form): p for p in problem.values[v].packed}
        self.kept = len(columns)  # the variable k of value 0
        self.differs = self.kept + len(problem.values)  # its variable d
        lossy = any(p.lossy for ways in self.pack for p in ways.values())
        self.peak = self.differs + len(problem.values) * lossy
        self.unit = float(max(problem.live, default=1) or 1)  # bytes
        self.first = [min((problem.values[v].first for v in o.makes), default=NEVER)
                      for o in problem.operations]
        self.readers: list[list[int]] = [[] for _ in problem.values]  # that may run again
        for x, operation in enumerate(problem.operations):
            if self.run[x] is not None:
                for u in operation.reads:
                    self.readers[u].append(x)
        self.rows = _Rows()
        self.chains: dict[tuple[str, int, int], int] = {}  # the variables a and b
        self.fits: dict[int, int] = {}  # the row of each position that is written out
        self._available()
        if lossy:
            self._differences()
        self.total = sum(o.seconds for o in problem.operations) or 1.0
        if at_most < math.inf:
            self.rows.add(-at_most / self.total, ((-share, column) for share, column in self._shares()))
        latest = latest_runs(problem.values, problem.operations)
        # For each value, the last position at which what reads it can run again.
        self.until = [max((latest[x] for x in readers), default=-1) for readers in self.readers]

    def solve(self, slack: dict[int, int], limit: int | None, gap: float, relaxed: bool = False
              ) -> tuple[frozenset[int], dict[int, Packed], float, int] | None:
        """(operations to run again, values to pack, gap, modelled peak bytes), or None if nothing fits.

        Without a `limit` the peak is minimized; `relaxed` allows fractions of decisions.
        """
        # Half a second, of steps with a budget only.
        from scipy.optimize import Bounds, LinearConstraint, milp

        for position in slack:
            if position not in self.fits:
                self._chains(position)
                self._fits(position)
        low = np.array(self.rows.low)
        for position, less in slack.items():
            low[self.fits[position]] += less / self.unit
        columns = self.peak + 1 + len(self.chains)
        cost, upper, integral = np.zeros(columns), np.ones(columns), np.zeros(columns)
        integral[:self.peak] = not relaxed
        upper[self.peak] = np.inf if limit is None else limit / self.unit
        self._objective(cost, limit is None)
        with _silent():
            found = milp(cost, integrality=integral, bounds=Bounds(0, upper),
                         constraints=LinearConstraint(self.rows.matrix(columns), lb=low),
                         options={"mip_rel_gap": gap, "node_limit": NODES, "time_limit": SECONDS})
        if found.x is None:
            return None
        chosen = {i for i in range(self.kept) if found.x[i] > 0.5}
        again = frozenset(o for o, r in enumerate(self.run) if r in chosen)
        packed = {v: p for v, ways in enumerate(self.pack) for c, p in ways.items() if c in chosen}
        return again, packed, float(found.mip_gap or 0.0), int(found.x[self.peak] * self.unit)

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
        cost[self.peak] = 1.0 if for_peak else 1e-6

    def _available(self) -> None:
        for v, value in enumerate(self.problem.values):
            kept, made = [(1, self.kept + v)], self._term(value.operation)
            packed = [(1, c) for c in self.pack[v]]
            if value.needed:
                self.rows.add(1, [*kept, *made, *packed])
            restored = [(1, c) for c, p in self.pack[v].items() if p.restores]
            for x in self.readers[v]:
                self.rows.add(0, [*kept, *made, *restored, (-1, self.run[x])])
            if packed:
                for other in (kept, made):
                    self.rows.add(-1, [(-1, column) for _, column in (*packed, *other)])

    def _term(self, operation: int) -> list[tuple[float, int]]:
        r = self.run[operation]
        return [] if r is None else [(1, r)]

    def _differences(self) -> None:
        d, add = self.differs, self.rows.add
        for v, value in enumerate(self.problem.values):
            add(0, [(1, d + v), *((-1, c) for c, p in self.pack[v].items() if p.lossy)])
            if value.exact:
                add(0, [(-1, d + v)])
        for o, operation in enumerate(self.problem.operations):
            if (r := self.run[o]) is None:
                continue
            for u in operation.reads:
                for v in operation.makes:
                    add(-1, [(1, d + v), (-1, d + u), (-1, r)])
            for u in operation.exact:
                add(-1, [(-1, d + u), (-1, r)])
        for v, o in self.problem.together:
            add(0, [*self._term(o), (-1, d + v)])

    def _chains(self, position: int) -> None:
        """Operations that have run again by `position` because another has, last ones first."""
        for o in range(len(self.problem.operations) - 1, -1, -1):
            operation = self.problem.operations[o]
            runs = self.run[o] is not None and self.first[o] > position
            if operation.position > position:
                continue
            for u in operation.makes:
                if not (runs or self.pack[u] and self.problem.values[u].first > position):
                    continue
                by = [b for x in self.readers[u] if (b := self._by(x, position)) is not None]
                if by and self.pack[u]:
                    back = self._chain("back", u, position)
                    for reader in by:
                        self.rows.add(0, [(1, back), (1, self.kept + u), (-1, reader)])
                    if runs:
                        self.rows.add(0, [(1, self._chain("again", o, position)), (-1, back),
                                          *((1, c) for c in self.pack[u])])
                else:
                    for reader in by:
                        self.rows.add(0, [(1, self._chain("again", o, position)),
                                          (1, self.kept + u), (-1, reader)])

    def _chain(self, kind: str, number: int, position: int) -> int:
        return self.chains.setdefault((kind, number, position), self.peak + 1 + len(self.chains))

    def _by(self, x: int, position: int) -> int | None:
        """The variable that says whether x has run again by `position`; None if it cannot have."""
        if self.first[x] <= position:
            return self.run[x]
        return self.chains.get(("again", x, position))

    def _fits(self, position: int) -> None:
        terms: list[tuple[float, int]] = [(1.0, self.peak)]
        fixed = self.problem.live[position]
        for v, value in enumerate(self.problem.values):
            size, packed = value.nbytes / self.unit, self.pack[v]
            if size < TINY or value.last > position:
                continue
            in_gap = value.needed and position < value.first
            if value.last < position:
                if in_gap:
                    if self.run[value.operation] is None and not packed:
                        continue  # alive as it is
                    fixed -= value.nbytes
                    terms.append((-size, self.kept + v))
                    key = ("back", v) if packed else ("again", value.operation)
                    if (chain := self.chains.get((*key, position))) is not None:
                        terms.append((-size, chain))
                elif position <= self.until[v] and (not value.needed or value.final < position):
                    terms.append((-size, self.kept + v))  # only as an operand of what runs again
            if in_gap or not value.needed and position <= self.until[v]:
                terms += [(-p.nbytes / self.unit, c) for c, p in packed.items()]
        self.fits[position] = len(self.rows.low)
        self.rows.add(fixed / self.unit, terms)
