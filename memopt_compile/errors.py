"""Failures that the user sees. Each says what happened, where, and what to do next."""

from typing import ClassVar


class MemoptError(Exception):
    """Base of every error of this package.

    Args:
        what: what is wrong, one sentence.
        where: the option, node or line of the user's source; rendered with `str`.
        do: what the user can do about it.

    `id` is stable across releases: a message may be reworded, its id never changes meaning.
    """

    id: ClassVar[str] = "MEMOPT-E001"

    def __init__(self, what: str, where: object = None, do: str | None = None):
        # `where` becomes text now: an error that crosses a process has to pickle, and a kept
        # graph node would keep its whole graph alive.
        self.what = what
        self.where = None if where is None else str(where)
        self.do = do
        super().__init__(self.what, self.where, self.do)

    def __str__(self) -> str:
        lines = [f"{self.id}: {self.what}"]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.do:
            lines.append(f"  what to do: {self.do}")
        lines.append(f"  see docs/errors.md#{self.id.removeprefix('MEMOPT-').lower()}")
        return "\n".join(lines)


class CaptureError(MemoptError):
    """The training step could not be proved captured, so it is not compiled."""

    id = "MEMOPT-E101"


class OptionError(MemoptError):
    """An option is unknown, has a wrong value, or belongs to a planned feature."""

    id = "MEMOPT-E201"


class InfeasibleBudget(MemoptError):
    """No plan fits the memory budget with the means that the options allow.

    Args:
        what, where, do: see `MemoptError`.
        budget_bytes: the budget, in bytes of the step's peak.
        smallest_peak_bytes: the smallest peak that was found. As `memory_budget` it is kept, if nothing else changes.
        resident_bytes: what of it is there before the step begins: parameters, optimizer state, buffers and the batch.
    """

    id = "MEMOPT-E301"

    def __init__(self, what: str, where: object = None, do: str | None = None, *, budget_bytes: int | None = None,
                 smallest_peak_bytes: int | None = None, resident_bytes: int | None = None):
        super().__init__(what, where, do)
        self.budget_bytes = budget_bytes
        self.smallest_peak_bytes = smallest_peak_bytes
        self.resident_bytes = resident_bytes


class VerifyError(MemoptError):
    """A step graph breaks one of its own invariants."""

    id = "MEMOPT-E401"


class PassError(MemoptError):
    """A pass failed, or left something other than what it promised."""

    id = "MEMOPT-E501"


class NumericsError(MemoptError):
    """The compiled step's numbers differ from eager by more than its passes declare."""

    id = "MEMOPT-E601"


class OptimizerError(MemoptError, ValueError):
    """An optimizer of `memopt.optim` was given a setting, gradient or state that it cannot use."""

    id = "MEMOPT-E701"


class QuantizationError(MemoptError, ValueError):
    """A parameter cannot be kept in low precision, or not be used as it was."""

    id = "MEMOPT-E801"


class RankError(MemoptError):
    """The ranks of a process group differ in what has to be the same on all of them."""

    id = "MEMOPT-E901"
