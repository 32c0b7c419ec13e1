"""What memopt did with a step, for people: `explain`, `report`, and the files of `dump=`."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Callable

import torch

from .liveness import Timeline
from .options import Options
from .step_graph import StepGraph


@dataclass
class Compilation:
    """One graph that Dynamo handed over, and everything that was decided about it.

    `kind` is "step" (forward, backward and what follows in one graph), "model" (no backward in
    the graph) or "ordinary" (run as Dynamo captured it, for `reason`). Bytes are of the whole
    step, inputs included; `measured_peak_bytes` is of its first run.
    """

    kind: str
    options: Options
    lowering: str
    where: str = ""
    reason: str | None = None
    device: torch.device = torch.device("cpu")
    step: StepGraph | None = None
    before: Timeline | None = None
    after: Timeline | None = None
    passes: tuple = ()
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    pieces: Any = None
    texts: dict[str, str] = field(default_factory=dict)

    def measured(self, run: Callable) -> Callable:
        return run

    def dump(self) -> None:
        pass

    def peak_line(self) -> str | None:
        from .step_graph import source_line

        point = self.after.peak if self.after else None
        return source_line(point.node) if point else None


_compilations: OrderedDict[Any, list[Compilation]] = OrderedDict()


def remember(frame: Any, compilation: Compilation) -> None:
    """Keep `compilation` for `report`, under the code object that was being traced."""
    _compilations.setdefault(frame, []).append(compilation)
