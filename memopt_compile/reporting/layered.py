"""`memopt.explain_layers`: the plan of a deep model, from plans of shallow ones.

Tracing takes seconds a layer, and layers that are equal teach nothing new:

1. Between its forward and its backward every layer holds the same bytes, s, and behind its backward the
   same again, g (gradients that wait, for the norm of all, say). What else is alive belongs to the one
   layer that runs or to none. So the bytes at any moment are c + i·s + j·g with i + j layers, and the
   peak of a step of L layers is the highest of some lines in L. It can get steeper up to max(s, g),
   and once it is that steep it is one line for all depths.
2. Steps of three depths are planned. Resident bytes and the peak have to grow evenly, by category,
   and the peak beyond the inputs by max(s, g): s and g are how much more is alive at the end of forward
   and of backward in a model that is one layer deeper.
3. Otherwise there is no plan: layers are not alike, or the depths are too small.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from ..errors import CaptureError, OptionError
from ..options import format_bytes
from ..records import Compilation
from ..step_graph import Phase
from .explaining import planned
from .render import Report


@dataclass(frozen=True)
class LayeredReport:
    """The plan of a step of `layers` equal layers.

    Attributes:
        predicted_peak_bytes, resident_bytes: of the whole step, inputs included in both.
        at_peak: bytes by category when the peak is reached; `a_layer` is how much of it one layer is.
        depths: the reports of the steps that were planned whole, by their number of layers.
        seconds: for making and planning those.
    """

    layers: int
    predicted_peak_bytes: int
    resident_bytes: int
    at_peak: dict[str, int]
    a_layer: dict[str, int]
    depths: dict[int, Report]
    seconds: float

    def __str__(self) -> str:
        report = self.depths[max(self.depths)]
        rows = [[name, format_bytes(size), format_bytes(self.a_layer[name])]
                for name, size in self.at_peak.items() if size]
        rows.append(["all", format_bytes(self.predicted_peak_bytes), format_bytes(sum(self.a_layer.values()))])
        table = tabulate(rows, ["at the peak", "bytes", "a layer"], tablefmt="simple",
                         disable_numparse=True, colalign=("left", "right", "right"))
        return (f"memopt: {report.where}, {self.layers} layers by plans of "
                f"{', '.join(map(str, self.depths))} ({report.lowering} lowering)\n\n"
                f"  peak           {format_bytes(self.predicted_peak_bytes)} predicted, while "
                f"{report.peak_at} runs\n"
                f"  resident       {format_bytes(self.resident_bytes)}\n"
                f"  planned in     {self.seconds:.1f} seconds\n\n"
                + "\n".join(f"  {line}".rstrip() for line in table.splitlines()) + "\n")


def explain_layers(make: Callable[[int], tuple[Callable[..., Any], Sequence[Any]]], layers: int,
                   depths: Sequence[int] = (2, 3, 4), **options: Any) -> LayeredReport:
    """What `memopt.explain` would say of a step with `layers` equal layers, without tracing them all.

    Args:
        make: gives the step and its arguments for a number of layers. Each call builds a model.
        layers: of the model to plan.
        depths: three smaller numbers of layers, one after the other, that are planned whole.
        options: the fields of `Options`, except `memory_budget`.

    Raises:
        OptionError: an option is wrong, or the step does not grow evenly (see the module).
        CaptureError: the step could not be captured whole.
    """
    where = f"explain_layers, depths={tuple(depths)}"
    first = depths[0] if depths else 0
    if list(depths) != [first, first + 1, first + 2] or first < 1:
        raise OptionError("these are not three depths one after the other", where=where, do="depths=(2, 3, 4)")
    if options.get("memory_budget") is not None:
        raise OptionError("a budget is for one depth: plans for it differ in other ways than by a layer",
                          where=where, do="leave memory_budget out")
    start = time.perf_counter()
    records = [_planned(make, depth, options) for depth in depths]
    reports = {depth: Report.of(record) for depth, record in zip(depths, records)}
    growth = [_growth(a, b) for a, b in zip(list(reports.values()), list(reports.values())[1:])]
    a_layer, peaks = growth[-1], [r.after.transient_peak_bytes for r in records]
    steepest = max(_alive_at_end(records[-1], phase) - _alive_at_end(records[-2], phase)
                   for phase in (Phase.FORWARD, Phase.BACKWARD))
    if growth[0] != a_layer or peaks[-1] - peaks[-2] != steepest:  # rule 3
        raise OptionError(
            f"the peak does not grow as layers do: by {_listed(growth[0])} and then by {_listed(a_layer)}, "
            f"where a layer leaves {format_bytes(steepest)} alive", where=where,
            do="choose deeper ones if all layers are alike, or plan the whole step by memopt.explain")
    last, more = reports[depths[-1]], layers - depths[-1]
    at_peak = {name: size + more * a_layer[name] for name, size in last.memory.at_peak.items()}
    inputs, before = (sum(reports[depth].inputs.values()) for depth in (depths[-1], depths[-2]))
    resident = inputs + more * (inputs - before)  # gradients that are none of the inputs are at the peak
    return LayeredReport(layers, sum(at_peak.values()), resident, at_peak, a_layer, reports,
                         time.perf_counter() - start)


def _planned(make: Callable[[int], tuple], depth: int, options: dict[str, Any]) -> Compilation:
    step, args = make(depth)
    record = planned(step, args, options)
    if record.kind != "step" or record.after is None:
        raise CaptureError(f"with {depth} layers the step is not captured whole: {record.reason}",
                           where=record.where, do="see memopt.explain of that depth")
    return record


def _alive_at_end(record: Compilation, phase: Phase) -> int:
    """Rule 2: bytes beyond the inputs when the last operator of a phase runs."""
    return next((p.live_bytes for p in reversed(record.after.points) if p.phase is phase), 0)


def _growth(shallow: Report, deep: Report) -> dict[str, int]:
    return {name: size - shallow.memory.at_peak[name] for name, size in deep.memory.at_peak.items()}


def _listed(growth: dict[str, int]) -> str:
    return ", ".join(f"{format_bytes(size)} of {name}" for name, size in growth.items() if size) or "nothing"
