"""Plans that overflow, changed step by step until their simulation fits.

The planner's integer program counts what backward reads. Right before an operator of backward, though, a whole burst
may run again, with operands in its midst that backward does not read itself: where a layer is unrolled in time,
one product for all steps at once. No row of the program has those, and holding the rows that it has to ever less mostly
leaves nothing. So where that does not converge the plan itself is changed, by what the simulation says:

1. One group of operations is added to those that run again, or taken from them, at a time: of the values that are
   kept at the highest point, or of what runs again in the burst around it. The one that most relieves all
   points above the limit for the seconds that it adds is taken. If none relieves any the least bad is, and no group
   is changed twice within `REST` turns.
2. Once the plan fits, each group that is not needed any more is taken out again, the slowest first.
3. Each of the two takes as many trials (`trials`) as `OPERATORS` allow, so that the same plan comes out on every machine.

What is packed stays as it is, and whatever depends on that (`_movable`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from .packing import Packed
from .rematerialization import Problem, simulate
from .trials import Trials

OPERATORS = 600_000  # of the steps that are tried: a fifth of a second or so
REST = 12  # turns
PATIENCE = 8  # turns without a better plan
INSTANT = 1e-7  # seconds: what is added counts as at least so much


def mended(problem: Problem, groups: Sequence[int], again: Collection[int], packed: Mapping[int, Packed],
           limit: int) -> frozenset[int] | None:
    """Operations to run again in place of `again`, with which the peak is at most `limit`; None if none were found."""
    mending = _Mending(problem, _movable(problem, groups, packed), frozenset(again), packed, limit)
    running = frozenset(g for g, all_of in mending.members.items() if all_of & frozenset(again))
    best = mending.fit(running)
    if best is None:
        return None
    mending.renew()
    return mending.operations(mending.needed(best))


class _Mending:
    """The groups that may be changed, by their operations (`members`), what is `fixed`, and the trials that are `left`."""

    def __init__(self, problem: Problem, members: Mapping[int, frozenset[int]], again: frozenset[int],
                 packed: Mapping[int, Packed], limit: int):
        self.problem, self.members, self.packed, self.limit = problem, members, packed, limit
        self.fixed = again.difference(*members.values())
        self.trials = Trials(problem, packed)
        self.renew()

    def renew(self) -> None:
        self.left = OPERATORS // max(1, len(self.problem.order))

    def operations(self, groups: Iterable[int]) -> frozenset[int]:
        return self.fixed.union(*(self.members[g] for g in groups))

    def seconds(self, groups: Iterable[int]) -> float:
        return sum(self.problem.operations[o].seconds for g in groups for o in self.members[g])

    def live(self, groups: Iterable[int]) -> np.ndarray:
        self.left -= 1
        return self.trials.bytes(self.operations(groups))

    def fit(self, running: frozenset[int]) -> frozenset[int] | None:
        """Rule 1; None if it comes to no end."""
        excess = least = _excess(self.live(running), self.limit)
        changed: dict[int, int] = {}  # the turn in which a group was
        turn = since = 0
        while excess:
            found: list[tuple[float, int, int]] = []
            for group in self.near(running):
                if turn - changed.get(group, -REST) < REST:
                    continue
                gain = excess - (remains := _excess(self.live(running ^ {group}), self.limit))
                cost = max(INSTANT, -self.seconds([group]) if group in running else self.seconds([group]))
                found.append((gain / cost if gain > 0 else gain * cost, group, remains))
            if not found or self.left < 0:
                return None
            _, group, excess = max(found)
            running ^= {group}
            changed[group] = turn
            turn += 1
            since = 0 if excess < least else since + 1
            least = min(least, excess)
            if since > PATIENCE:
                return None
        return running

    def near(self, running: frozenset[int]) -> list[int]:
        """The groups that a change of the highest point can be of."""
        outcome = simulate(self.problem, self.operations(running), self.packed)
        highest = max(range(len(outcome.live)), key=outcome.live.__getitem__)
        alive = outcome.alive(highest)
        burst = {key[1] for key, at in zip(outcome.order, outcome.at)
                 if at == outcome.at[highest] and type(key) is tuple and key[0] == "again"}
        kept = {value.operation for value in self.problem.values if value.node in alive}
        return [group for group, all_of in sorted(self.members.items()) if all_of & (burst | kept)]

    def needed(self, running: frozenset[int]) -> frozenset[int]:
        """Rule 2: what is taken out may leave room for what came before it, so that all are tried until none goes."""
        before = None
        while before != running:
            before = running
            for group in sorted(running, key=lambda g: (-self.seconds([g]), g)):
                if self.left >= 0 and self.live(running - {group}).max() <= self.limit:
                    running -= {group}
        return running


def _movable(problem: Problem, groups: Sequence[int], packed: Mapping[int, Packed]) -> dict[int, frozenset[int]]:
    """The operations of each group that may be changed: neither they nor what they read is packed. None if any value
    is in a lossy format: then what may run again depends on what differs."""
    if any(each.lossy for each in packed.values()):
        return {}
    members: dict[int, set[int]] = {}
    bound = set()
    for o, (group, operation) in enumerate(zip(groups, problem.operations)):
        if operation.again:
            members.setdefault(group, set()).add(o)
        if packed.keys() & {*operation.makes, *operation.reads}:
            bound.add(group)
    return {group: frozenset(all_of) for group, all_of in members.items() if group not in bound}


def _excess(live: np.ndarray, limit: int) -> int:
    """The bytes above the limit, of the highest point of each stretch that is above it."""
    above = np.concatenate([[0], np.maximum(live - limit, 0), [0]])
    edges = np.flatnonzero(np.diff(above > 0))
    return int(np.maximum.reduceat(above, edges + 1)[::2].sum()) if len(edges) else 0
