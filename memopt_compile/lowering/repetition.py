"""Where to cut a schedule, given as labels of its operators: around stretches that repeat themselves, and elsewhere where little crosses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

LONGEST = 400  # operators: above that look for repetition inside, or cut where little is live
WORTH = 30  # operators, a second of compilation: a repetition that saves less is not worth the calls
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


def cuts(labels: np.ndarray, crossing: Callable[[int], np.ndarray], borders: Sequence[int], low: int, high: int) -> list[int]:
    """Cuts of [low, high): around each turn of its longest repetition, and so on outside it; there at each of `borders`. What a
    cut before each position costs is `crossing` of a span: see `pieces`."""
    start, period, length = longest_repetition(labels[low:high]) or (0, 0, 0)
    if length - period < WORTH:
        return _split(crossing, borders, low, high)
    start, turns = _align(crossing(period), low + start, period, length)
    points = [start + k * period for k in range(turns + 1)]
    if period > LONGEST:
        inner = cuts(labels, crossing, borders, start, start + period)
        points += [p + k * period for p in inner for k in range(turns)]
    return [*cuts(labels, crossing, borders, low, start), *points,
            *cuts(labels, crossing, borders, points[turns], high)]


def _align(crossing: np.ndarray, start: int, period: int, length: int) -> tuple[int, int]:
    """Turn the repetition so that its cuts fall where least crosses: (start, turns)."""
    def cost(shift: int) -> tuple[int, int, int]:
        turns = (length - shift) // period
        inside = [crossing[start + shift + k * period] for k in range(turns + 1)]
        return int(np.median(inside)), -turns, shift

    shift = min(range(min(period, length - 2 * period + 1)), key=cost)
    return start + shift, (length - shift) // period


def _split(crossing: Callable[[int], np.ndarray], borders: Sequence[int], low: int, high: int) -> list[int]:
    """Cuts of a stretch without repetition: at its borders, and where least crosses if it is long."""
    at = next((b for b in borders if low < b < high), None)
    if at is None and high - low <= LONGEST:
        return []
    if at is None:
        quarter = (high - low) // 4
        at = low + quarter + int(crossing(high - low)[low + quarter:high - quarter].argmin())
    return [*_split(crossing, borders, low, at), at, *_split(crossing, borders, at, high)]
