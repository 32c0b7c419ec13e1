"""The largest batch with which a step fits a number of bytes; nothing of the step runs.

A plan with a dynamic batch gives the peak as a formula, and that a first guess. Where the step
cannot be captured so, a line through the last two plans does. The answer stands on two plans for
exact sizes: the batch fits, and the next larger one does not.

With a budget the planner drops activations, so that a larger batch fits. The smallest peak that was
found for one that does not is, beyond what is resident, about in proportion to the batch: the next guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..compat import trace
from ..errors import MemoptError, OptionError
from ..options import FOR_A_BUDGET, format_bytes, parse_bytes
from .explaining import explain
from .formulas import largest
from .frontier import Frontier
from .render import Report


@dataclass(frozen=True)
class Fit:
    """The largest `batch` whose peak is at most `limit_bytes`.

    `peak_bytes` has the predicted peak of every batch that was planned, the answer and the next
    larger one among them; `formula` is the peak in bytes as a sympy expression, or None. With a
    budget, `unbudgeted` is the largest batch without (0 if there is none).
    """

    batch: int
    limit_bytes: int
    peak_bytes: Mapping[int, int]
    formula: Any = None
    unbudgeted: int | None = None

    def __str__(self) -> str:
        above = min(b for b in self.peak_bytes if b > self.batch)
        limit, peak, next_peak = map(format_bytes, (self.limit_bytes, self.peak_bytes[self.batch],
                                                    self.peak_bytes[above]))
        if self.unbudgeted is None:
            return f"batch {self.batch} fits {limit}: its peak is {peak}, that of {above} is {next_peak}"
        return (f"batch {self.batch} fits {limit} as memory_budget, {self.unbudgeted} without: its peak is "
                f"{peak}, the smallest that was found for {above} is {next_peak}")


def fit(step: Callable[..., Any], args: Sequence[Any], memory: int | str, *, multiple_of: int = 1,
        budgeted: bool = False, progress: Callable[[str], Any] = lambda line: None,
        **options: Any) -> Fit:
    """The largest batch with which `step(*args)` fits.

    Args:
        step: a training step, as for `explain`.
        args: example arguments. The batch is the first dimension of the first tensor; tensors
            that share its size are made longer or shorter by repeating their rows.
        memory: bytes of peak, as an int or text such as "6GiB".
        multiple_of: only multiples of this are tried; n for a step of n micro-batches.
        budgeted: plan with `memory` as the step's `memory_budget`: activations are computed again,
            or what else `options` allow. Peaks are then of the schedule, before it is lowered.
        progress: called with a line for every plan.
        options: the fields of `Options`.

    Raises:
        OptionError: no tensor to take the batch from, or the smallest batch does not fit.
    """
    limit = parse_bytes(memory) if isinstance(memory, str) else memory
    given = next((a.shape[0] for a in args if isinstance(a, Tensor) and a.dim()), 0)
    if given < 1 or multiple_of < 1:
        raise OptionError("no argument has a batch to change", where="fit",
                          do="give the step a tensor whose first dimension is the batch")
    if budgeted and options.get("memory_budget") is not None:
        raise OptionError("the budget is `memory`", where="fit(budgeted=True, memory_budget=..)",
                          do="leave memory_budget out")

    if "memory_budget" in options:
        raise OptionError("the bytes are fit's own argument", where="fit with memory_budget",
                          do="say budgeted=True (--budgeted in a shell) to plan within them")
    planned: dict[int, int] = {}

    unbudgeted = {name: value for name, value in options.items() if not budgeted or name not in FOR_A_BUDGET}

    def explained(units: int, options: dict[str, Any] = unbudgeted) -> Report | Frontier:
        return explain(step, *resized(args, given, units * multiple_of), **options)

    def note(units: int, peak_bytes: int) -> bool:
        planned[units * multiple_of] = peak_bytes
        progress(f"batch {units * multiple_of}: {format_bytes(peak_bytes)}")
        return peak_bytes <= limit

    formula, guess = _guess(step, args, given, limit, unbudgeted)
    low = _search(lambda units: note(units, _peak(explained(units))), 0,
                  max(1, (guess or given) // multiple_of),
                  lambda low, high: _on_a_line(low, high, planned, multiple_of, limit))
    found = Fit(low * multiple_of, limit, planned, formula)
    if budgeted:
        planned = {batch: peak for batch, peak in planned.items() if peak <= limit}
        refused: dict[int, int] = {0: 0}  # smallest peaks, by units

        def fits(units: int) -> bool:
            plan = explained(units, {**options, "memory_budget": [limit]})
            peak, refused[0] = plan.points[0].peak_bytes, plan.resident_bytes
            if peak > limit:
                refused[units] = peak
            return note(units, peak)

        low = _search(fits, low, 2 * low or 1, lambda low, high: _below(low, high, refused, limit))
        found = Fit(low * multiple_of, limit, planned, formula, found.batch)
    if low == 0:
        raise OptionError(f"a batch of {multiple_of} still needs {format_bytes(planned[multiple_of])}",
                          where=f"memory={memory!r}", do="give more bytes, or shrink the model")
    return found


def resized(args: Sequence[Any], given: int, batch: int) -> tuple[Any, ...]:
    """`args` with `batch` rows in every tensor that had `given`."""
    return tuple(a[torch.arange(batch, device=a.device) % given]
                 if isinstance(a, Tensor) and a.dim() and a.shape[0] == given else a for a in args)


def _peak(report: Report) -> int:
    if report.predicted_peak_bytes is None:
        raise OptionError("nothing is predicted for a step that is not captured whole", where="fit",
                          do="see memopt.explain for the reason")
    return report.predicted_peak_bytes


def _guess(step: Callable, args: Sequence[Any], given: int, limit: int,
           options: Mapping[str, Any]) -> tuple[Any, int]:
    """The formula and the batch that it says fits; None and 0 where the batch is not dynamic."""
    copies = resized(args, given, given)
    for copy, original in zip(copies, args):
        if copy is not original:
            trace.let_batch_vary(copy)
    try:
        report = explain(step, *copies, **options)
        return report.formula, largest(report.formula, report.sizes, limit)
    except MemoptError:  # the step wants its batch fixed, or nothing fits: exact plans tell
        return None, 0


def _search(fits: Callable[[int], bool], low: int, units: int,
            between: Callable[[int, int | None], int]) -> int:
    """The largest number that `fits`, where the next does not; `low` does, or is 0. `units` is tried
    first, then what is said to be `between` one that fits and one that does not, if there is one yet."""
    high = None
    while high is None or high - low > 1:
        if fits(units):
            low = units
        else:
            high = units
        units = between(low, high)
    return low


def _on_a_line(low: int, high: int | None, planned: Mapping[int, int], unit: int, limit: int) -> int:
    """Where a line through the last two plans meets the limit, or through the origin and the only one."""
    (a, x), (b, y) = [(0, 0), *planned.items()][-2:]
    meets = int((b + (limit - y) * (b - a) / (y - x)) / unit) if y != x else 0
    return min(max(meets, low + 1), high - 1 if high else 4 * low)


def _below(low: int, high: int | None, refused: Mapping[int, int], limit: int) -> int:
    """Where a line through the smallest peaks of the two smallest batches refused meets the limit, or
    through the only one and what is resident; one more if that is known to fit, else halfway."""
    if high is None:
        return 2 * low
    (a, x), (b, y) = sorted(refused.items())[-2:] if len(refused) == 2 else sorted(refused.items())[1:3]
    meets = int(a + (limit - x) * (b - a) / (y - x)) if y > x else 0
    meets += meets == low
    return meets if low < meets < high else (low + high) // 2
