"""The record of a compilation: filled by `driver`, read by `report`, `render` and `dumping`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from . import compat
from .arena import Buffer
from .compat import trace
from .errors import OptionError
from .liveness import Timeline
from .lowering.replaying import Replayed
from .measure import measure
from .options import Options
from .pass_runs import Known
from .planning.adaptation import Replan
from .reporting import dumping
from .reporting.render import Report
from .shadow import GradientError
from .step_graph import StepGraph, source_line

log = logging.getLogger("memopt_compile")


@dataclass
class Compilation:
    """One graph that Dynamo handed over, and everything that was decided about it.

    `kind` is "step" (forward, backward and what follows in one graph), "evaluation" (a function without
    backward in one graph, under a budget), "model" (no backward in the graph) or "ordinary" (run as Dynamo
    captured it, for `reason`). Bytes are of the whole
    step, inputs included; `measured_peak_bytes` is of its first run. `texts` are the graphs
    before and after each pass, kept only if `options.dump` or a log wants them; `program` is what
    the lowering generated; `budget_bytes` is `options.memory_budget` in bytes of peak; `captured` is the step before any pass, kept for a `frontier`;
    `folder` is where `dump` wrote; `largest_difference` is that of the first step from eager, and
    `gradient_error` what compressed activations do to its gradients, if `options.verify` asked for it: for that
    `versions` has the step before and after it was compressed. `taken_back` counts the steps that met
    what few bits cannot hold and were run by the program `exact`; `history` has the plans that
    `options.adapt` has brought; `known` is what plans of the step have in common, while there may be more;
    `replayed` is the program as `options.cuda_graphs` has it run;
    `arena` is the memory that `options.arena` asks for, one for all steps of a model; `collectives` are those
    that all ranks have to make in the step, in their order.
    """

    kind: str
    options: Options
    lowering: str
    where: str = ""
    reason: str | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    step: StepGraph | None = None
    captured: StepGraph | None = None
    before: Timeline | None = None
    budget_bytes: int | None = None
    after: Timeline | None = None
    passes: tuple = ()
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    largest_difference: float | None = None
    gradient_error: GradientError | None = None
    versions: dict[str, StepGraph] = field(default_factory=dict)
    exact: Callable[[list], Any] | None = field(default=None, repr=False)
    taken_back: int = 0
    history: list[Replan] = field(default_factory=list)
    pieces: Any = None
    texts: dict[str, str] = field(default_factory=dict)
    program: str | None = None
    folder: Path | None = None
    known: Known = field(default_factory=Known, repr=False)
    replayed: Replayed | None = None
    arena: Buffer = field(default_factory=Buffer, repr=False)
    collectives: str = field(default="", repr=False)

    def observe(self, name: str, step: StepGraph) -> None:
        """Keep and show the graph as it is now, where someone asked to see it.

        `name` is "captured" before the first pass, then that of the pass which has just run.

        Raises:
            OptionError: the folder `options.dump` cannot be written.
        """
        if self.options.verify and name in ("plan_memory", "compress"):
            self.versions[name] = step.copy()
        artifact = "memopt_before" if name == "captured" else f"memopt_after_{name}"
        debugging = log.isEnabledFor(logging.DEBUG)
        if self.options.dump is None and not debugging:  # Texts of large graphs take a while.
            trace.artifact(artifact, step.text)
            return
        text = step.text()
        numbered = f"{len(self.texts):02d}_{name}"
        self.texts[numbered] = text
        if self.options.dump is not None:
            dumping.write_graph(self, numbered, text)
        trace.artifact(artifact, lambda: text)
        if debugging:
            log.debug("%s: graph %s:\n%s", self.where, artifact.removeprefix("memopt_"), text)

    def measured(self, run: Callable[[list], Any]) -> Callable[[list], Any]:
        """`run`, a boxed callable, with the first of its runs measured.

        Only the first, because recording costs time; on CUDA the second, as in the first libraries and
        Triton's tuning take memory of their own. A run under the user's own profiler stays
        unmeasured, since two cannot record at once, and the next one is measured in its place.
        """
        waiting, warm = True, self.device.type != "cuda"
        self.program = getattr(run, "source", self.program)
        if self.folder is not None:
            dumping.write_program(self, self.folder)

        def measured_once(inputs: list) -> Any:
            nonlocal waiting, warm
            if not (waiting and warm) or trace.profiler_active():
                warm = True
                return run(inputs)
            waiting = False
            result = self._measure(run, inputs)
            if self.measured_peak_bytes is not None and self.folder is not None:
                dumping.write_report(self, self.folder)
            return result

        measured_once._boxed_call = True  # type: ignore[attr-defined]
        return measured_once

    def _measure(self, run: Callable[[list], Any], inputs: list) -> Any:
        measurement = measure(run, inputs, resident=())
        self.measured_peak_bytes = max(measurement.peak_bytes, self.measured_peak_bytes or 0)
        return measurement.result

    def compressed(self, error: GradientError) -> None:
        """Keep what compressed activations do to the first step's gradients, and say it."""
        self.gradient_error = error
        log.info("%s: gradients with compressed activations: %s", self.where, error)

    def dump(self) -> None:
        """Log the report, and write the files that `options.dump` asks for.

        Raises:
            OptionError: the folder cannot be written.
        """
        trace.artifact("memopt_report", lambda: str(Report.of(self)))
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s", Report.of(self))
        if self.options.dump is not None:
            dumping.write(self)

    def peak_line(self) -> str | None:
        """The user's line that runs when the predicted peak is reached."""
        point = self.after.peak if self.after else None
        return source_line(point.node) if point else None


# By identity: equal code objects of two functions are not one function.
_compilations: WeakIdKeyDictionary = WeakIdKeyDictionary()
_planned: ContextVar[list[Compilation] | None] = ContextVar("planned", default=None)
_captured_only: ContextVar[bool] = ContextVar("captured_only", default=False)


def remember(frame: Any, compilation: Compilation) -> None:
    """Keep `compilation` for `report`, under the code object that was being traced.

    It lives as long as that code does. Inside `planning` it goes there instead.
    """
    planned = _planned.get()
    if planned is not None:
        planned.append(compilation)
    elif frame is not None:
        _compilations.setdefault(frame, []).append(compilation)


def forget(frame: Any, compilation: Compilation) -> None:
    """Take back `remember`: the frame is traced again."""
    planned = _planned.get()
    (_compilations.get(frame, []) if planned is None else planned).remove(compilation)


@contextlib.contextmanager
def planning(captured_only: bool = False) -> Iterator[list[Compilation]]:
    """Collect what is compiled inside, and keep it out of every `report`.

    `captured_only` stops before the passes: the records have the `captured` steps.
    """
    collected: list[Compilation] = []
    tokens = _planned.set(collected), _captured_only.set(captured_only)
    try:
        yield collected
    finally:
        _planned.reset(tokens[0])
        _captured_only.reset(tokens[1])


def captured_only() -> bool:
    return _captured_only.get()


def nothing_runs() -> bool:
    """Whether what is compiled here is only planned."""
    return _planned.get() is not None


def code_of(step: Callable[..., Any]) -> CodeType:
    """The code of the user's function behind `step`, compiled or not.

    Raises:
        OptionError: `step` is no Python function.
    """
    function = compat.undecorated(compat.with_optimized_original(step))
    if not hasattr(function, "__code__"):
        raise OptionError(f"a {type(step).__name__} is no training step", where=repr(step)[:80],
                          do="give the function, method or module that torch.compile was given")
    return function.__code__


def compilations(code: CodeType) -> list[Compilation]:
    """What was compiled of the function with this code, and of its rest after graph breaks."""
    return [each for known, found in list(_compilations.items()) if _part_of(known, code)
            for each in found]


def _part_of(code: CodeType, step: CodeType) -> bool:
    """Whether `code` is that of `step`, or of the rest of it after a graph break."""
    if code is step:
        return True
    lines = [line for _, _, line in step.co_lines() if line is not None]
    return (code.co_filename == step.co_filename
            and code.co_name.startswith(f"torch_dynamo_resume_in_{step.co_name}_at_")
            and min(lines) <= code.co_firstlineno <= max(lines))
