"""What a rewrite of a step owes, and the record of one that has run.

A pass is a frozen dataclass whose fields are its options. It may assume a step that verifies and
owes one that verifies; checking, timing and reporting happen between passes, in `pass_runs`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar

from .step_graph import StepGraph


class Numerics(enum.Enum):
    """What a pass may do to the numbers; tests hold it to that."""

    BITWISE = "bitwise"  # the same operations on the same values in another order or place
    REORDERED = "reordered"  # equal in exact arithmetic
    LOSSY = "lossy"  # only if the user asked for it


@dataclass(frozen=True)
class StepPass:
    """Base of every pass. Finding nothing to do is a valid result."""

    name: ClassVar[str]
    numerics: ClassVar[Numerics] = Numerics.BITWISE

    def requires(self, step: StepGraph) -> str | None:
        """Why this pass does not apply to `step`, or None if it does."""
        return None

    def run(self, step: StepGraph, costs: Any = None) -> None:
        """Rewrite `step` in place."""
        raise NotImplementedError

    def ensures(self, step: StepGraph) -> str | None:
        """What `step` lacks of that which this pass promises, or None. Asked after `run`."""
        return None


@dataclass(frozen=True)
class PassRecord:
    """What one pass did: transient peaks in bytes, and how many nodes of each operator came or
    went. `refusal` is the reason if it did not apply."""

    name: str
    op_changes: tuple[tuple[str, int], ...]
    peak_before: int
    peak_after: int
    seconds: float
    refusal: str | None = None

    def row(self) -> tuple[str, str, str, str]:
        """Name, peak, operators and time, as text for a table."""
        peak = f"{self.peak_before:,} -> {self.peak_after:,} B"
        changes = ", ".join(f"{name} {change:+d}" for name, change in self.op_changes)
        return self.name, peak, self.refusal or changes or "same operators", f"{self.seconds:.2f} s"

    def __str__(self) -> str:
        return "  ".join(self.row())
