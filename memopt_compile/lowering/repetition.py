"""Stretches that repeat themselves, in a schedule as labels of its operators."""

from __future__ import annotations

import numpy as np

SHORTEST = 12  # operators: below that a call costs more than compiling it twice


def longest_repetition(labels: np.ndarray,
                       shortest: int = SHORTEST) -> tuple[int, int, int] | None:
    """(start, period, length) of the longest stretch that repeats itself at least once, with
    the shortest period, from `shortest` on, among equally long ones."""
    best: tuple[int, int, int] | None = None
    for period in range(shortest, len(labels) // 2 + 1):
        if best is not None and best[2] == len(labels):
            break
        same = np.concatenate(([0], labels[:-period] == labels[period:], [0])).astype(np.int8)
        edges = np.flatnonzero(np.diff(same))
        if not len(edges):
            continue
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        longest = int(lengths.argmax())
        length = int(lengths[longest]) + period
        if length >= 2 * period and (best is None or length > best[2]):
            best = int(starts[longest]), period, length
    return best
