"""The largest batch with which a step fits a number of bytes; nothing of the step runs.

A plan with a dynamic batch gives the peak as a formula, and that a first guess. Where the step
cannot be captured so, a line through the last two plans does. The answer stands on two plans for
exact sizes: the batch fits, and the next larger one does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import compat_trace
from .errors import MemoptError, OptionError
from .explaining import explain
from .formulas import largest
from .options import format_bytes, parse_bytes


@dataclass(frozen=True)
class Fit:
    """The largest `batch` whose peak is at most `limit_bytes`.

    `peak_bytes` has the predicted peak of every batch that was planned, the answer and the next
    larger one among them; `formula` is the peak in bytes as a sympy expression, or None.
    """

    batch: int
    limit_bytes: int
    peak_bytes: Mapping[int, int]
    formula: Any = None

    def __str__(self) -> str:
        above = min(b for b in self.peak_bytes if b > self.batch)
        return (f"batch {self.batch} fits {format_bytes(self.limit_bytes)}: its peak is "
                f"{format_bytes(self.peak_bytes[self.batch])}, that of {above} is "
                f"{format_bytes(self.peak_bytes[above])}")


def fit(step: Callable[..., Any], args: Sequence[Any], memory: int | str, *, multiple_of: int = 1,
        progress: Callable[[str], Any] = lambda line: None, **options: Any) -> Fit:
    """The largest batch with which `step(*args)` fits.

    Args:
        step: a training step, as for `explain`.
        args: example arguments. The batch is the first dimension of the first tensor; tensors
            that share its size are made longer or shorter by repeating their rows.
        memory: bytes of peak, as an int or text such as "6GiB".
        multiple_of: only multiples of this are tried; n for a step of n micro-batches.
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
    planned: dict[int, int] = {}

    def peak(units: int) -> int:
        batch = units * multiple_of
        if batch not in planned:
            planned[batch] = _plan(step, resized(args, given, batch), options)
            progress(f"batch {batch}: {format_bytes(planned[batch])}")
        return planned[batch]

    formula, guess = _guess(step, args, given, limit, options)
    low, high = 0, None  # in units of `multiple_of`: fits, does not fit
    units = max(1, (guess or given) // multiple_of)
    while high is None or high - low > 1:
        if peak(units) <= limit:
            low = units
        else:
            high = units
        units = _next(low, high, planned, multiple_of, limit)
    if low == 0:
        raise OptionError(f"a batch of {multiple_of} still needs {format_bytes(planned[multiple_of])}",
                          where=f"memory={memory!r}", do="give more bytes, or shrink the model")
    return Fit(low * multiple_of, limit, planned, formula)


def resized(args: Sequence[Any], given: int, batch: int) -> tuple[Any, ...]:
    """`args` with `batch` rows in every tensor that had `given`."""
    return tuple(a[torch.arange(batch, device=a.device) % given]
                 if isinstance(a, Tensor) and a.dim() and a.shape[0] == given else a for a in args)


def _plan(step: Callable, args: tuple, options: Mapping[str, Any]) -> int:
    peak = explain(step, *args, **options).predicted_peak_bytes
    if peak is None:
        raise OptionError("nothing is predicted for a step that is not captured whole", where="fit",
                          do="see memopt.explain for the reason")
    return peak


def _guess(step: Callable, args: Sequence[Any], given: int, limit: int,
           options: Mapping[str, Any]) -> tuple[Any, int]:
    """The formula and the batch that it says fits; None and 0 where the batch is not dynamic."""
    copies = resized(args, given, given)
    for copy, original in zip(copies, args):
        if copy is not original:
            compat_trace.let_batch_vary(copy)
    try:
        report = explain(step, *copies, **options)
        return report.formula, largest(report.formula, report.sizes, limit)
    except MemoptError:  # the step wants its batch fixed, or nothing fits: exact plans tell
        return None, 0


def _next(low: int, high: int | None, planned: Mapping[int, int], unit: int, limit: int) -> int:
    """What to plan next between `low` and `high`: where a line through two plans meets the limit,
    or through the origin and the only one."""
    (a, x), (b, y) = [(0, 0), *planned.items()][-2:]
    meets = int((b + (limit - y) * (b - a) / (y - x)) / unit) if y != x else 0
    return min(max(meets, low + 1), high - 1 if high else 4 * low)
