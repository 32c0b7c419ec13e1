"""The decision about each activation, as a value that can be read and printed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from tabulate import tabulate

from .options import format_bytes


@dataclass(frozen=True)
class Decision:
    """What becomes of one activation between forward and backward.

    `name` is its node's, `value` type and shape, `bytes` its size, `choice` "keep", "recompute",
    "offload", "partition" or "compress" with the `form`, `kept_bytes` what is held of it in between, `seconds` what its operator
    takes by the cost model, or packing and unpacking it, `line` the user's, `error` the share of the
    value's norm that the format loses of normal numbers.
    """

    name: str
    value: str
    bytes: int
    choice: str
    seconds: float
    line: str | None = None
    form: str = ""
    kept_bytes: int = 0
    error: float = 0.0

    @property
    def bytes_saved(self) -> int:
        return self.bytes - self.kept_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """A choice for every activation of a step.

    `limit_bytes` is the transient peak that was asked for (beyond the step's inputs), `peak_bytes`
    the one that the plan has by simulation, `seconds` what it adds to a step by the cost model, `gap` the
    share of these that a better plan could save at most, as the solver proved of its program;
    `again` names the operators that run again, those for the sake of others included; `packed` are
    the names of what is packed, with the formats; `costs` says where the seconds are from.
    """

    HEAD: ClassVar = ("activation", "value", "bytes", "choice", "kept", "µs", "made by")

    limit_bytes: int
    peak_bytes: int
    seconds: float
    gap: float
    decisions: tuple[Decision, ...] = field(repr=False)
    again: frozenset[str] = field(repr=False)
    packed: tuple[tuple[str, str], ...] = field(repr=False, default=())
    costs: str = "roofline"

    @property
    def largest_error(self) -> float:
        """That of any format in use: about what it costs the gradients that the value enters."""
        return max((d.error for d in self.decisions), default=0.0)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes

    def chosen(self, choice: str) -> tuple[Decision, ...]:
        return tuple(d for d in self.decisions if d.choice == choice)

    def rows(self) -> list[list[str]]:
        """The decisions as cells under `HEAD`, largest first."""
        return [[d.name, d.value, format_bytes(d.bytes), d.form or d.choice, format_bytes(d.kept_bytes),
                 f"{1e6 * d.seconds:.1f}", d.line or ""]
                for d in sorted(self.decisions, key=lambda d: -d.bytes)]

    def table(self) -> str:
        return tabulate(self.rows(), self.HEAD, tablefmt="simple", disable_numparse=True)

    def __str__(self) -> str:
        again, packed, away, parts = map(self.chosen, ("recompute", "compress", "offload", "partition"))
        text = (f"{len(again)} of {len(self.decisions)} activations "
                f"({format_bytes(sum(d.bytes for d in again))}) are computed again, by "
                f"{len(self.again)} operators, ")
        if packed:
            text += (f"{len(packed)} ({format_bytes(sum(d.bytes for d in packed))}) kept in "
                     f"{format_bytes(sum(d.kept_bytes for d in packed))}"
                     + (f" (errors up to {self.largest_error:.1%}), " if self.largest_error else ", "))
        if away:
            text += f"{len(away)} ({format_bytes(sum(d.bytes for d in away))}) wait in host memory, "
        if parts:
            text += f"{len(parts)} ({format_bytes(sum(d.bytes for d in parts))}) kept in parts by several ranks, "
        return (text + f"{1e3 * self.seconds:.3f} ms by the cost model ({self.costs}), "
                       f"gap {self.gap:.1%}")
