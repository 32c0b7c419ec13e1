"""The live bytes of many choices for one step: what `rematerialization.simulate` says, several times as fast.

Most of a step is the same whatever is chosen. So the bytes of the step as it is are the start, and each choice adds and
takes away the lives that it changes: from one point of its schedule to another, so many bytes more or less.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from ..transfers import HOST
from .packing import Packed
from .rematerialization import NOTHING, PUT_AWAY, Problem, carried, chain, deaths


class Trials:
    """The step of `problem` with the values `packed` packed, of which any set of operations may run again."""

    def __init__(self, problem: Problem, packed: Mapping[int, Packed] = NOTHING):
        self.problem, self.packed = problem, packed
        values = problem.values
        number = {value.node: v for v, value in enumerate(values)}
        count, death = len(problem.order), deaths(problem)
        self.live = np.array(problem.live, dtype=np.int64)
        self.carried = np.array(carried(problem), dtype=np.int64)
        self.death = [death[value.node] for value in values]
        # When backward first needs an operation or a packed value: position, and place among what is needed there.
        self.needed: dict[int, tuple] = {}
        self.unpacked: list[tuple] = []
        seen = set()
        for position, node in enumerate(problem.order):
            if problem.backward[position]:
                for place, v in enumerate(number[r] for a in node.all_input_nodes for r in problem.roots[a] if r in number):
                    self.needed.setdefault(values[v].operation, (position, 0, place))
                    if v in packed and v not in seen:
                        seen.add(v)
                        self.unpacked.append((position, 1, place, v))
        self.packs = sorted(packed, key=lambda v: (values[v].last, packed[v].form == HOST, packed[v].form in PUT_AWAY, v))
        self.packed_at = np.array([values[v].last for v in self.packs], dtype=np.int64)
        self.old = np.arange(count)
        self.positions = np.arange(count) + self.packed_at.searchsorted(np.arange(count), "left")  # with what is packed
        self.workspace = [problem.workspace(operation.node) for operation in problem.operations]

    def bytes(self, again: Collection[int]) -> np.ndarray:
        """`Outcome.live` of a choice."""
        values, operations, packed = self.problem.values, self.problem.operations, self.packed
        again, what, before = set(again), *self._inserted(set(again))
        where = np.array(before, dtype=np.int64)

        inserted = where + np.arange(len(where)) + self.packed_at.searchsorted(where, "left")
        packing = self.packed_at + 1 + where.searchsorted(self.packed_at, "right") + np.arange(len(self.packs))
        own = self.positions + where.searchsorted(self.old, "right")
        base = np.zeros(len(own) + len(inserted) + len(packing), dtype=np.int64)
        base[own] = self.live
        places = [*own.tolist(), len(base)]  # of the step's own operators
        base[inserted] = self.carried[where]
        base[packing] = self.carried[self.packed_at + 1]

        start: dict[int, int] = {}  # where a value is there again, by its number
        end: dict[int, int] = {}  # the last place in which something inserted reads a value
        for place, (kind, number) in zip(inserted.tolist(), what):
            if kind == "again":
                base[place] += self.workspace[number]
                start.update(dict.fromkeys(operations[number].makes, place))
                end.update(dict.fromkeys(operations[number].reads, place))
            else:
                base[place] += self.problem.workspace(packed[number].decode)
                start[number] = place
        lives: list[tuple[int, int, int]] = []  # bytes, from a place up to before another

        def until(v: int, place: int) -> None:
            """v, as forward made it, dies behind `place`."""
            old = places[self.death[v]]
            lives.append((-values[v].nbytes, place + 1, old + 1) if place < old else (values[v].nbytes, old + 1, place + 1))

        for place, v in zip(packing.tolist(), self.packs):
            base[place] += self.problem.workspace(packed[v].encode)
            until(v, place)
            lives.append((packed[v].nbytes, place, start.get(v, place) + 1))
        for o in again:
            for v in operations[o].makes:
                if v not in packed:
                    until(v, places[values[v].last])
        for v, place in start.items():
            final = places[values[v].final] if values[v].needed else place
            lives.append((values[v].nbytes, place, max(place, final, end.get(v, place)) + 1))
        for v, place in end.items():
            if v not in start and place > places[self.death[v]]:
                until(v, place)
        change = np.zeros(len(base) + 1, dtype=np.int64)
        if lives:
            size, first, behind = np.array(lives, dtype=np.int64).T
            np.add.at(change, first, size)
            np.subtract.at(change, np.minimum(behind, len(base)), size)
        return base + np.cumsum(change)[:-1]

    def _inserted(self, again: set[int]) -> tuple[list[tuple[str, int]], list[int]]:
        """What runs again or is unpacked, in order, and the positions before which it is, as `simulate` has it."""
        operations, packed = self.problem.operations, self.packed
        what: list[tuple[str, int]] = []
        before: list[int] = []
        done: set[int] = set()  # values

        def insert(kind: str, number: int, position: int) -> None:
            what.append((kind, number))
            before.append(position)

        asked = sorted([(*self.needed[o], o) for o in again if o in self.needed] + self.unpacked)
        for position, unpacking, _, number in asked:
            if unpacking:
                if number not in done:
                    done.add(number)
                    insert("unpack", number, position)
                continue
            for o in chain(self.problem, number, again, done):
                for v in operations[o].reads:
                    if v in packed and v not in done:
                        done.add(v)
                        insert("unpack", v, position)
                insert("again", o, position)
        return what, before
