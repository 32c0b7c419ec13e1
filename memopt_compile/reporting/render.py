"""A compilation in words and tables: `Report`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from ..arena import Arena, arena_of
from ..data_sizes import are_in
from ..liveness import Timeline, lifetimes
from ..memory_plan import MemoryPlan
from ..options import format_bytes
from ..planning.adaptation import Replan
from ..shadow import GradientError
from ..step_graph import StepGraph, describe, short_names, source_line, storage_roots
from ..step_pass import PassRecord
from ..structure import repeats
from . import timeline as drawing
from .formulas import peak_formula, symbols
from .model_memory import ModelMemory, input_bytes, kinds_of_values, model_memory

if TYPE_CHECKING:
    from ..records import Compilation

LINES = 12  # tensors printed; `Report.largest` has all that are alive
KINDS = {
    "step": "whole step",
    "evaluation": "evaluation: no backward in it",
    "model": "model only: activations, no optimizer",
    "ordinary": "ordinary path: nothing was saved",
}


@dataclass(frozen=True)
class LiveTensor:
    """A tensor that the step allocates and that is alive at the peak of its schedule.

    `name` is the node's as in `StepGraph.text`, `kind` is as in `ModelMemory`; `line` is the user's
    source line that made it.
    """

    bytes: int
    name: str
    value: str
    phase: str
    kind: str
    line: str | None


@dataclass(frozen=True)
class Report:
    """What memopt did with one graph. All bytes are of the whole step, inputs included.

    Attributes:
        kind: "step", "model" or "ordinary", as in `Compilation`; `reason` says why not a step.
        where: file and line of the function.
        lowering: "inductor" or "eager".
        predicted_peak_bytes: of the program that runs; None where nothing was predicted.
        measured_peak_bytes: of its first run; None if it has not run, or could not be measured.
        resident_bytes: the inputs', alive throughout; `inputs` has them by kind.
        memory: all bytes by kind, and which way the gradients took; of a whole step.
        before_peak_bytes: predicted for the captured step before any pass.
        budget_bytes: `memory_budget` in bytes, None without one.
        passes: a `PassRecord` for each pass; its bytes leave out the inputs'.
        largest: the tensors alive at the peak of the schedule, largest first.
        peak_at: the node that runs then, with its phase and the user's line.
        others: reports of further graphs of the same function.
        folder: where `dump` wrote, None if it was not asked for.
        repeats: equal stretches of the schedule, such as "6 × forward of a layer (43 operators)".
        largest_difference: relative, of the first step from eager; None without `verify`.
        gradient_error: what compressed activations do to the first step's gradients; as above.
        timelines: (position in the schedule, live bytes) "before passes" and "after passes".
        formula: with dynamic shapes, the peak bytes of the schedule in its sizes, a sympy
            expression; `sizes` has what they were. Other bytes are of these sizes.
        data_sizes: whether only the data tell some sizes, as of ``x[mask]``, which are counted at their largest.
        plan: what becomes of each activation, where the budget needed a decision.
        taken_back: steps with activations that are not finite, which ran again without compression.
        arena: where what ranks gather and send lies, with `options.arena`; moments are places in the schedule.
        history: when and why `adapt` has planned again, and what came of it.
        replayed: how often and when the step was recorded as a CUDA graph, or why not (`options.cuda_graphs`).
    """

    kind: str
    where: str
    lowering: str
    reason: str | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    resident_bytes: int | None = None
    before_peak_bytes: int | None = None
    budget_bytes: int | None = None
    inputs: dict[str, int] = field(default_factory=dict)
    memory: ModelMemory | None = None
    passes: tuple[PassRecord, ...] = ()
    largest: list[LiveTensor] = field(default_factory=list, repr=False)
    peak_at: str | None = None
    others: tuple[Report, ...] = field(default=(), repr=False)
    folder: str | None = None
    repeats: tuple[str, ...] = ()
    largest_difference: float | None = None
    gradient_error: GradientError | None = None
    timelines: dict[str, list[tuple[int, int]]] = field(default_factory=dict, repr=False)
    formula: Any = None
    data_sizes: bool = False
    sizes: dict[Any, int] = field(default_factory=dict)
    plan: MemoryPlan | None = None
    taken_back: int = 0
    arena: Arena | None = None
    replayed: str | None = None
    history: tuple[Replan, ...] = ()

    @classmethod
    def of(cls, record: Compilation, others: Sequence[Compilation] = ()) -> Report:
        """The report of a compilation, in whatever state it is."""
        step, after = record.step, record.after
        sizes = symbols(step) if step and after else {}
        lines = {"before passes": record.before, "after passes": after}
        return cls(
            kind=record.kind,
            where=record.where,
            lowering=record.lowering,
            reason=record.reason,
            predicted_peak_bytes=record.predicted_peak_bytes,
            measured_peak_bytes=record.measured_peak_bytes,
            resident_bytes=after.resident_bytes if after else None,
            before_peak_bytes=record.before.peak_bytes if record.before else None,
            budget_bytes=record.budget_bytes,
            inputs=input_bytes(step) if step else {},
            memory=model_memory(step, after) if step and after and record.kind != "model" else None,
            passes=tuple(record.passes),
            largest=alive_at_peak(step, after) if step and after else [],
            peak_at=_peak_at(step, after) if step and after else None,
            others=tuple(cls.of(each) for each in others),
            folder=str(record.folder) if record.folder else None,
            repeats=tuple(map(str, repeats(step))) if step and after else (),
            largest_difference=record.largest_difference,
            gradient_error=record.gradient_error,
            timelines={label: _points(each) for label, each in lines.items() if each},
            formula=peak_formula(step) if sizes else None,
            data_sizes=are_in(step.graph) if step else False,
            sizes=sizes,
            plan=step.plan if step else None,
            taken_back=record.taken_back,
            arena=arena_of(step.graph, storage_roots(step.graph)) if step else None,
            history=tuple(record.history),
            replayed=record.replayed.state if record.replayed else None,
        )

    @property
    def error_percent(self) -> float | None:
        """How far the prediction lies above (+) or below (-) the measured peak."""
        if self.predicted_peak_bytes is None or not self.measured_peak_bytes:
            return None
        return 100 * (self.predicted_peak_bytes / self.measured_peak_bytes - 1)

    def draw(self, path: str | Path) -> None:
        """Draw predicted memory over the step before and after the passes, and the budget.

        Raises ValueError if nothing was predicted, and OSError if `path` cannot be written.
        """
        drawing.draw(self.timelines, path, self.budget_bytes,
                     f"Predicted memory of {self.where or 'the step'}")

    def __str__(self) -> str:
        parts = [self._headline(), self._summary(), self._memory_table(), self._pass_table(),
                 self._plan_table(), self._peak_table()]
        if self.others:
            lines = [f"  {other._headline()}: {other._peak_line()}" for other in self.others]
            parts.append("\n".join(["other graphs of this function:", *lines]))
        return "\n\n".join(part for part in parts if part) + "\n"

    def _headline(self) -> str:
        return f"memopt: {self.where or 'step'} ({KINDS[self.kind]}; {self.lowering} lowering)"

    def _peak_line(self) -> str:
        if self.predicted_peak_bytes is None:
            return "no prediction for this graph"
        text = f"{format_bytes(self.predicted_peak_bytes)} predicted"
        if self.error_percent is not None:
            text += f", {format_bytes(self.measured_peak_bytes or 0)} measured"
            text += f" (prediction off by {round(self.error_percent, 2) + 0.0:+.2f}%)"
        return text

    def _summary(self) -> str:
        rows = [("reason", self.reason)] if self.reason else []
        rows.append(("peak", self._peak_line()))
        if self.sizes:
            at = ", ".join(f"{symbol} = {size}" for symbol, size in self.sizes.items())
            rows.append(("formula", f"{self.formula} bytes, here {at}"))
        if self.data_sizes:
            rows.append(("sizes", "those that depend on data are counted at their largest"))
        if self.before_peak_bytes is not None:
            rows.append(("before passes", format_bytes(self.before_peak_bytes)))
        if self.budget_bytes is not None:
            rows.append(("budget", format_bytes(self.budget_bytes)))
        if self.plan is not None:
            rows.append(("plan", str(self.plan)))
        rows += [("planned again", str(each)) for each in self.history]
        if self.taken_back:
            rows.append(("taken back", f"{self.taken_back} steps with activations that are not finite ran "
                                       "again without compression"))
        if self.largest_difference is not None:
            rows.append(("verified", f"{self.largest_difference:.1e} from eager, relative"))
        if self.gradient_error is not None:
            rows.append(("gradients", str(self.gradient_error)))
        if self.resident_bytes is not None:
            parts = [f"{role} {format_bytes(size)}" for role, size in self.inputs.items() if size]
            rows.append(("resident", f"{format_bytes(self.resident_bytes)}: {', '.join(parts)}"))
        if self.memory is not None and self.memory.waited_for:
            held, largest = format_bytes(self.memory.at_once), format_bytes(self.memory.largest)
            rows.append(("waiting", f"all {held} of gradients are alive at once, where the largest has {largest}, for "
                                    + _short(self.memory.waited_for)))
        if self.arena is not None:
            lost = f", {format_bytes(self.arena.lost_bytes)} lost between them" if self.arena.lost_bytes else ""
            rows.append(("arena", f"{format_bytes(self.arena.nbytes)} for {len(self.arena.tenants)} tenants, at "
                                  f"most {format_bytes(self.arena.lower_bound_bytes)} at once{lost}"))
        if self.replayed:
            rows.append(("CUDA graph", self.replayed))
        if self.repeats:
            rows.append(("repeats", ", ".join(self.repeats[:3])))
        if self.folder:
            rows.append(("dumped to", self.folder))
        return "\n".join(f"  {label:<15}{text}" for label, text in rows)

    def _memory_table(self) -> str:
        if self.memory is None or not self.memory.parameters:
            return ""
        of = self.memory
        rows = [[kind, *self._sizes(size, of.at_peak[kind], of.most[kind])]
                for kind, size in of.between.items() if of.most[kind]]
        rows.append(["model memory", *self._sizes(of.model_bytes(of.between), of.model_bytes(of.at_peak)), ""])
        head = ["kind", "between steps", "bits", "at the peak", "bits", "at most"]
        return (f"memory by kind, also in bits for each of {of.parameters:,} parameters; gradients {of.way}:\n"
                + _table(rows, head, right=(1, 2, 3, 4, 5)))

    def _sizes(self, between: int, at_peak: int, *most: int) -> list[str]:
        found = []
        for size in (between, at_peak):
            bits = self.memory.bits(size) if self.memory else 0.0
            found += [format_bytes(size), f"{bits:.2f}"]
        return found + [format_bytes(size) for size in most]

    def _pass_table(self) -> str:
        rows = [_pass_row(each, self.resident_bytes or 0) for each in self.passes]
        head = ["pass", "peak before", "peak after", "saved", "seconds", "operators"]
        return _table(rows, head, right=(1, 2, 3, 4))

    def _plan_table(self) -> str:
        if self.plan is None:
            return ""
        rows = [row[:-1] + [_short(row[-1])] for row in self.plan.rows()[:LINES]]
        left = len(self.plan.decisions) - len(rows)
        return ("activations between forward and backward, by what they hold:\n"
                + _table(rows, list(self.plan.HEAD), right=(2, 4))
                + (f"\n  and {left} more" if left else ""))

    def _peak_table(self) -> str:
        if not self.peak_at:
            return ""
        head = ["bytes", "name", "value", "phase", "kind", "made by"]
        rows = [[format_bytes(each.bytes), each.name, each.value, each.phase, each.kind,
                 _short(each.line)] for each in self.largest[:LINES]]
        left = self.largest[LINES:]
        text = f"alive at the peak of the schedule, beyond the inputs, while {self.peak_at} runs:\n"
        text += _table(rows, head, right=(0,))
        if left:
            text += f"\n  and {len(left)} more, {format_bytes(sum(e.bytes for e in left))} together"
        return text


def alive_at_peak(step: StepGraph, timeline: Timeline) -> list[LiveTensor]:
    """What `step` has allocated and not yet freed at the peak of `timeline`, largest first."""
    life, names = lifetimes(step.graph), short_names(step)
    kinds = kinds_of_values(step, life)
    order = [point.node for point in timeline.points]
    sizes = [point.live_bytes for point in timeline.points]
    at = sizes.index(max(sizes)) if sizes else -1
    needed = set(life.kept).union(*(life.touched[node] for node in order[at:]))
    alive = [node for node in order[: at + 1] if node in needed and life.size.get(node)]
    found = [
        LiveTensor(life.size[node], names[node], describe(node), step.phase(node).value,
                   kinds[node], source_line(node))
        for node in alive
    ]
    return sorted(found, key=lambda each: -each.bytes)


def _peak_at(step: StepGraph, timeline: Timeline) -> str | None:
    point = timeline.peak
    if point is None:
        return None
    line = source_line(point.node)
    return f"{short_names(step)[point.node]} ({point.phase.value}{', ' + line if line else ''})"


def _points(timeline: Timeline) -> list[tuple[int, int]]:
    return [(i, timeline.resident_bytes + point.live_bytes)
            for i, point in enumerate(timeline.points)]


def _pass_row(record: PassRecord, resident: int) -> list[str]:
    before, after = record.peak_before, record.peak_after
    changes = sorted(record.op_changes, key=lambda change: -abs(change[1]))
    count = sum(change for _, change in changes)
    operators = f"{count:+d}: " + ", ".join(f"{name} {change:+d}" for name, change in changes)
    if record.refusal:
        operators = f"not run: {record.refusal}"
    elif not changes:
        operators = "same operators" if before == after else "same operators, reordered"
    return [record.name, format_bytes(resident + before), format_bytes(resident + after),
            format_bytes(before - after), f"{record.seconds:.2f}", _short(operators, 60)]


def _short(line: str | None, limit: int = 48) -> str:
    line = line or ""
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _table(rows: list[list[str]], head: list[str], right: Sequence[int]) -> str:
    if not rows:
        return ""
    align = ["right" if i in right else "left" for i in range(len(head))]
    text = tabulate(rows, head, tablefmt="simple", disable_numparse=True, colalign=align)
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())
