"""`memopt.explain_layers`: the plan of a deep model, from plans of shallow ones.

Tracing takes seconds a layer, and layers that are equal teach nothing new:

1. Between its forward and its backward every layer holds the same bytes, s, and behind its backward the
   same again, g (gradients that wait, for the norm of all, say). So it does ahead of its forward, f, and
   of its backward, b beside s: small parameters that ranks gather for many layers at once. What else is
   alive belongs to the one layer that runs or to none. So the bytes at any moment of forward are
   c + i·f + j·s with i + j layers, of backward c + i·(s + b) + j·g, which is highest in the first or the
   last layer of either, and there is one line in the number of layers.
2. Steps of three depths are planned. Resident bytes and the peak have to grow evenly, by category. The lines
   of other moments are known from two depths: both have the same operators at the beginnings and ends of
   their last forward and backward. The peak is the same moment for all depths at which none of them is higher.
   Where these are not known to hold a whole layer (what is no layer has more operators), the peak has to rise as steeply
   as any of them.
3. Otherwise there is no plan: layers are not alike, or the depths are too small. Nor is there one where a
   bucket of small tensors, which has room for so many bytes, is full before the last layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any

from tabulate import tabulate

from ..errors import CaptureError, OptionError
from ..liveness import Point
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
    a_layer, more, where_to = growth[-1], layers - depths[-1], {
        "where": where, "do": "choose deeper ones if all layers are alike, or plan the whole step by memopt.explain"}
    if growth[0] != a_layer:  # rule 3
        raise OptionError(f"the peak does not grow as layers do: by {_listed(growth[0])} and then by "
                          f"{_listed(a_layer)}", **where_to)
    shallow, deep = (r.after.transient_peak_bytes for r in records[-2:])
    peak = deep + more * (deep - shallow)
    moments = list(_moments(*records[-2:], depths[-2]))
    if not _hold_a_layer(*records[-2:], depths[-2]) and any(live - less > deep - shallow for less, live in moments):
        raise OptionError(f"the peak grows by {format_bytes(deep - shallow)} a layer beyond the inputs, and more than that is "
                          "alive behind each", **where_to)
    higher = max(live + more * (live - less) for less, live in moments)
    if higher > peak:
        raise OptionError(
            f"with {layers} layers the peak is not where it is with {depths[-1]}: there it would be "
            f"{format_bytes(peak)} beyond the inputs, and elsewhere {format_bytes(higher)}", **where_to)
    ahead, room = a_layer.get("gathered parameters", 0), records[-1].step.bucket_bytes
    if ahead and (layers + 1) * ahead > room:  # with what travels beside that of the layers
        raise OptionError(
            f"small parameters travel together up to {format_bytes(room)}, and {layers} layers have "
            f"{format_bytes(ahead)} each", where=where, do="plan the whole step by memopt.explain")
    last = reports[depths[-1]]
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


def _turns(record: Compilation) -> list[list[Point]]:
    """The last forward of a step, and the backward behind it."""
    points = [p for p in record.after.points if p.phase is not Phase.UPDATE]
    turns = [list(turn) for _, turn in groupby(points, key=lambda p: p.phase)]
    return turns[-2:]


def _moments(shallow: Compilation, deep: Compilation, depth: int) -> Iterator[tuple[int, int]]:
    """Rule 2: live bytes at the same operators of models of `depth` layers and of one more.

    The turns begin alike up to their last layer (whose input needs no gradient, for one), and so they end.
    """
    for less, more in zip(_turns(shallow), _turns(deep)):
        alike = (depth - 1) * (len(more) - len(less))
        for a, b in ((less, more), (less[::-1], more[::-1])):
            yield a[0].live_bytes, b[0].live_bytes
            yield from ((p.live_bytes, q.live_bytes) for p, q in takewhile(_same_operator, zip(a[:alike], b)))


def _hold_a_layer(shallow: Compilation, deep: Compilation, depth: int) -> bool:
    """Whether `_moments` reach through one layer at least, whatever of the other operators stands ahead of it."""
    return all((depth - 1) * layer >= len(more) - (depth + 1) * layer + layer
               for less, more in zip(_turns(shallow), _turns(deep)) for layer in [len(more) - len(less)])


def _same_operator(pair: tuple[Point, Point]) -> bool:
    return pair[0].node.target is pair[1].node.target


def _growth(shallow: Report, deep: Report) -> dict[str, int]:
    return {name: size - shallow.memory.at_peak[name] for name, size in deep.memory.at_peak.items()}


def _listed(growth: dict[str, int]) -> str:
    return ", ".join(f"{format_bytes(size)} of {name}" for name, size in growth.items() if size) or "nothing"
