"""What an integer program is written in, and its solutions: the sparse rows of `integer_program`."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NEARLY = 1e-7  # HiGHS' own tolerance is 1e-6

Terms = tuple[tuple[float, int], ...]  # factors of columns


@dataclass
class Rows:
    """Rows of a sparse matrix A with lower bounds: A x ≥ low."""

    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    entry: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    known: set[tuple[float, Terms]] = field(default_factory=set)

    def add(self, low: float, terms: Iterable[tuple[float, int]]) -> None:
        for entry, column in terms:
            self.row.append(len(self.low))
            self.column.append(column)
            self.entry.append(entry)
        self.low.append(low)

    def once(self, low: float, terms: Iterable[tuple[float, int]]) -> None:
        """The same unless the row is there."""
        if (row := (low, tuple(terms))) not in self.known:
            self.known.add(row)
            self.add(*row)

    def matrix(self, columns: int) -> Any:
        from scipy.sparse import coo_array

        return coo_array((self.entry, (self.row, self.column)),
                         shape=(len(self.low), columns)).tocsr()


@dataclass(frozen=True)
class Solved:
    """A `plan` that was solved for, whose third is its gap; its columns `x`; and what was asked: to minimize `cost` to within `gap`
    or so many `nodes`, with `low` ≤ A x and x ≤ `most`. Column `peak` may be anything
    below a limit."""

    plan: tuple[Any, Any, float, int]
    x: np.ndarray
    peak: int
    gap: float
    nodes: int
    cost: np.ndarray
    most: np.ndarray
    low: np.ndarray

    def holds(self, gap: float, nodes: int, cost: np.ndarray, most: np.ndarray, rows: Any, low: np.ndarray) -> bool:
        """Whether what is asked now has the same solution: it satisfies all, no bound is wider, and as much was tried before."""
        if not (np.array_equal(cost, self.cost) and low.shape == self.low.shape
                and (self.plan[2] <= gap or self.gap <= gap and nodes <= self.nodes)):
            return False
        x = self.x.copy()
        if math.isfinite(most[self.peak]):
            x[self.peak] = most[self.peak]
        return bool((most <= self.most).all() and (low >= self.low).all()
                    and (x <= most + NEARLY).all() and (rows @ x >= low - NEARLY).all())


@contextlib.contextmanager
def silent() -> Iterator[None]:
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
