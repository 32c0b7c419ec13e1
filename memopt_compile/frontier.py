"""Time against peak: what each budget costs, planned for one captured step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from . import devices, pipelines
from .costs import workspace
from .liveness import timeline
from .options import format_bytes
from .seconds import roofline
from .timeline import BOTTOM, LEFT, RIGHT, STYLE, TOP, scale

if TYPE_CHECKING:
    from .records import Compilation


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
    all its operators by the cost model. Peaks are of the schedule, before it is lowered.
    """

    where: str
    points: tuple[Point, ...]
    resident_bytes: int
    step_seconds: float

    def __str__(self) -> str:
        rows = [[format_bytes(p.budget_bytes), format_bytes(p.peak_bytes), f"{1e3 * p.seconds:.3f}",
                 f"{p.seconds / self.step_seconds:+.1%}", "yes" if p.fits else "no: the smallest found"]
                for p in self.points]
        head = ["budget", "planned peak", "added ms", "of the step", "fits"]
        table = tabulate(rows, head, tablefmt="simple", disable_numparse=True)
        return (f"memopt: {self.where}, {format_bytes(self.resident_bytes)} resident\n\n"
                + "\n".join(f"  {line}".rstrip() for line in table.splitlines()) + "\n")

    def draw(self, path: str | Path) -> None:
        """Draw planned peak against added time, to an SVG; OSError if it cannot be written."""
        shown = sorted({(p.seconds / self.step_seconds, p.peak_bytes) for p in self.points})
        step, top = scale(max(size for _, size in shown) / 2**20)
        pace, end = scale(100 * max(added for added, _ in shown) or 1)

        def place(added: float, size: float) -> tuple[float, float]:
            return (LEFT + (RIGHT - LEFT) * 100 * added / end,
                    BOTTOM - (BOTTOM - TOP) * size / 2**20 / top)

        title = f"Peak against time of {self.where}"
        parts = [f'<text class="title" x="{LEFT}" y="32">{escape(title)}</text>']
        for i in range(round(top / step) + 1):
            _, y = place(0, i * step * 2**20)
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/><text class="faint" '
                         f'x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{i * step:,.10g}</text>')
        for i in range(round(end / pace) + 1):
            x, _ = place(i * pace / 100, 0)
            parts.append(f'<text class="faint" x="{x:.1f}" y="{BOTTOM + 20}" '
                         f'text-anchor="middle">{i * pace:,.10g}</text>')
        parts.append(f'<text class="faint" x="{LEFT - 8}" y="{TOP - 14}" text-anchor="end">MiB</text>'
                     f'<text class="faint" x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 42}" '
                     'text-anchor="middle">time added to the step by the cost model (%)</text>')
        corners = [place(*each) for each in shown]
        line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)
        parts.append(f'<path class="line" style="stroke:var(--c0)" d="{line}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" style="fill:var(--c0)"/>'
                  for x, y in corners]
        _, floor = place(0, self.resident_bytes)
        parts.append(f'<path class="budget" d="M{LEFT} {floor:.1f}H{RIGHT}"/><text class="number '
                     f'over" x="{RIGHT}" y="{floor - 6:.1f}" text-anchor="end">resident '
                     f'{self.resident_bytes / 2**20:,.1f} MiB</text>')
        Path(path).write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 460" role="img" '
            f'aria-label="{escape(title)}">\n<style>{STYLE}</style>\n' + "\n".join(parts)
            + "\n</svg>\n", encoding="utf-8")


def frontier(record: Compilation, budgets: Sequence[Any]) -> Frontier:
    """Plan the captured step of `record` for each of `budgets` (as `Options.memory_budget`)."""
    captured, before = record.captured, record.before
    sizes = {devices.budget_bytes(b, before.peak_bytes, record.device, before.resident_bytes)
             for b in budgets}
    seconds = roofline(record.device)
    points = []
    for size in sorted(sizes, reverse=True):
        if points and not points[-1].fits:  # what was the smallest for more is it for less
            points.append(replace(points[-1], budget_bytes=size))
            continue
        step = captured.copy()
        costs = workspace(step, record.lowering)
        pipelines.run(step, pipelines.default(record.options, record.lowering, size, record.device),
                      costs=costs, workspace=costs)
        points.append(Point(size, timeline(step, costs).peak_bytes,
                            step.plan.seconds if step.plan else 0.0))
    return Frontier(record.where, tuple(points), before.resident_bytes,
                    sum(seconds(n) for n in captured.computing()))
