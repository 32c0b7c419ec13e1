"""Time against peak: what each budget costs, planned for one captured step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from .. import devices, pipelines
from ..costs import workspace
from ..liveness import timeline
from ..options import format_bytes
from ..pass_runs import Known
from ..timing import cost_model
from .timeline import frame, limit_line, scale, write_picture

if TYPE_CHECKING:
    from ..records import Compilation


@dataclass(frozen=True)
class Point:
    """What a budget comes to: the `peak_bytes` of the planned schedule, and the `seconds` that
    computing again adds to the step by the cost model. It does not fit where the peak is above."""

    budget_bytes: int
    peak_bytes: int
    seconds: float

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.budget_bytes


@dataclass(frozen=True)
class Frontier:
    """The plans of one step for several budgets, largest first.

    `resident_bytes` are the step's inputs, below which nothing goes; `step_seconds` is the time of
    all its operators by the cost model, and `costs` says where seconds are from. Peaks are of the
    schedule, before it is lowered.
    """

    where: str
    points: tuple[Point, ...]
    resident_bytes: int
    step_seconds: float
    costs: str = "roofline"

    def __str__(self) -> str:
        rows = [[format_bytes(p.budget_bytes), format_bytes(p.peak_bytes), f"{1e3 * p.seconds:.3f}",
                 f"{p.seconds / self.step_seconds:+.1%}", "yes" if p.fits else "no: the smallest found"]
                for p in self.points]
        head = ["budget", "planned peak", "added ms", "of the step", "fits"]
        table = tabulate(rows, head, tablefmt="simple", disable_numparse=True)
        return (f"memopt: {self.where}, {format_bytes(self.resident_bytes)} resident\n"
                f"  {1e3 * self.step_seconds:.3f} ms by the cost model ({self.costs})\n\n"
                + "\n".join(f"  {line}".rstrip() for line in table.splitlines()) + "\n")

    def draw(self, path: str | Path) -> None:
        """Draw planned peak against added time, to an SVG, or a page holding it for `.html`.

        Raises OSError if the file cannot be written.
        """
        shown = sorted({(100 * p.seconds / self.step_seconds, p.peak_bytes) for p in self.points})
        _, end = scale(max(added for added, _ in shown) or 1.0)
        title = f"Peak against time of {self.where}"
        parts, x, y = frame(title, max(size for _, size in shown), end,
                            "time added to the step by the cost model (%)")
        corners = [(x(added), y(size)) for added, size in shown]
        line = "M" + "L".join(f"{at:.1f} {height:.1f}" for at, height in corners)
        parts.append(f'<path class="line" style="stroke:var(--c0)" d="{line}"/>')
        parts += [f'<circle cx="{at:.1f}" cy="{height:.1f}" r="4" style="fill:var(--c0)"/>'
                  for at, height in corners]
        write_picture([*parts, *limit_line("resident", self.resident_bytes, y)], path, title)


def frontier(record: Compilation, budgets: Sequence[Any]) -> Frontier:
    """Plan the captured step of `record` for each of `budgets` (as `Options.memory_budget`)."""
    captured, before = record.captured, record.before
    sizes = {devices.budget_bytes(b, before.peak_bytes, record.device, before.resident_bytes)
             for b in budgets}
    points, known = [], Known()
    costs = workspace(captured, record.lowering)
    for size in sorted(sizes, reverse=True):
        if points and not points[-1].fits:  # what was the smallest for more is it for less
            points.append(replace(points[-1], budget_bytes=size))
            continue
        step, _ = pipelines.rewritten(captured, record.options, record.lowering, costs, size, record.device,
                                      known=known)
        point = Point(size, timeline(step, costs).peak_bytes, step.plan.seconds if step.plan else 0.0)
        if points and not point.fits:  # what a larger budget came by may be smaller still
            point = min(point, replace(points[-1], budget_bytes=size), key=lambda each: each.peak_bytes)
        points.append(point)
    seconds = cost_model(record.options.costs, record.device)
    return Frontier(record.where, tuple(points), before.resident_bytes,
                    sum(map(seconds, captured.computing())), seconds.source)
