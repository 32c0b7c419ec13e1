"""Runs passes over a step, verifying it after each, and remembers what they have made of a step before."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import OptionError, PassError
from .liveness import Workspace, no_workspace, timeline
from .progress import stage
from .step_graph import Role, StepGraph, mutated_args, storage_roots
from .step_pass import PassRecord, StepPass

REMEMBERED = 32  # graphs

Observer = Callable[[str, StepGraph], None]


@dataclass(frozen=True)
class Outcome:
    """What a pass has made of a step: `step` is None if that is what it was. `text` stands for the step then."""

    step: StepGraph | None
    text: bytes
    record: PassRecord
    counts: dict[str, int]


@dataclass
class Known:
    """What passes have made of one captured step, on one lowering: plans for other limits come by most of the same graphs.

    The latest `REMEMBERED` graphs are kept."""

    outcomes: dict[tuple[StepPass, bytes], Outcome] = field(default_factory=dict)

    def of(self, each: StepPass, text: bytes) -> Outcome | None:
        if found := self.outcomes.pop((each, text), None):
            self.outcomes[each, text] = found
        return found

    def keep(self, each: StepPass, text: bytes, outcome: Outcome) -> None:
        self.outcomes[each, text] = outcome
        if sum(o.step is not None for o in self.outcomes.values()) > REMEMBERED:
            while self.outcomes.pop(next(iter(self.outcomes))).step is None:
                pass

    def clear(self) -> None:
        self.outcomes.clear()


def run(step: StepGraph, passes: Sequence[StepPass], costs: Any = None, workspace: Workspace | None = None,
        observe: Observer | None = None, known: Known | None = None) -> tuple[PassRecord, ...]:
    """Run `passes` over `step` in place, verifying it before the first and after each.

    `observe` is called with the name of each pass that has run, and the step. What is `known` to come of a pass is taken.

    Raises:
        VerifyError: the step is not sound to begin with.
        PassError: a pass failed, or left something other than it promised.
    """
    workspace, records = workspace or no_workspace, []
    text, later = _text(step) if known is not None else b"", None  # `later`: what known passes have made of the step
    with _collector_paused():
        for each in passes:
            if known is not None and (found := known.of(each, text)):
                later, text, record, counts = found.step or later, found.text, found.record, found.counts
            else:
                if later is not None:
                    _become(step, later.copy())
                    later = None
                if not records:
                    step.verify()
                    peak, counts = timeline(step, workspace).transient_peak_bytes, step.op_counts()
                with stage(each.name):
                    record, counts, same = _run_one(step, each, costs, workspace, peak, counts)
                if known is not None:
                    before, text = text, text if same else _text(step)
                    known.keep(each, before, Outcome(None if same else step.copy(), text, record, counts))
            records.append(record)
            peak = record.peak_after
            if observe is not None:
                observe(each.name, step if later is None else later)
    if later is not None:
        _become(step, later.copy())
    return tuple(records)


def _become(step: StepGraph, other: StepGraph) -> None:
    for each in fields(step):
        setattr(step, each.name, getattr(other, each.name))


def _text(step: StepGraph) -> bytes:
    """Stands for `step` among those that passes have made of one step: the same operators of the same name have the same values."""
    written = hashlib.sha256(f"{step.windows} {step.bucket_bytes} {step.parallel} {step.ahead}".encode())
    for node in step.graph.nodes:
        written.update(f"{node.name} {node.target} {node.args} {node.kwargs} {step.phases.get(node)} {step.gradients.get(node)};".encode())
    return written.digest()


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Passes make many small objects and few cycles, beside millions that tracing has left:
    going through those again and again took half of their time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _run_one(step: StepGraph, each: StepPass, costs: Any, workspace: Workspace, peak: int, counts: dict[str, int]
             ) -> tuple[PassRecord, dict[str, int], bool]:
    """Run one pass over `step` of transient peak `peak` bytes and `op_counts` `counts`: its record, the counts then, and
    whether the step is what it was."""
    start = time.perf_counter()
    refusal = each.requires(step)
    if refusal is not None:
        return PassRecord(each.name, (), peak, peak, time.perf_counter() - start, refusal), counts, True
    before, written = _contents(step), _written(step)
    try:
        each.run(step, costs)
        same = len(now := _contents(step)) == len(before) and all(map(operator.is_, now, before))
        step.verify(same)
        lack = each.ensures(step) or (None if same else _unwritten(step, written))
    except OptionError:
        raise  # what the user asked for does not go with this step
    except Exception as error:  # whatever it is, the user needs to know which pass it was
        raise PassError(
            f"the pass {each.name} failed: {error}",
            where=each,
            do="report it with the folder that options={'dump': ...} writes",
        ) from error
    if lack is not None:
        raise PassError(
            f"the pass {each.name} did not do what it promises: {lack}",
            where=each,
            do="report it with the folder that options={'dump': ...} writes",
        )
    counted = counts if same else step.op_counts()
    changes = {name: counted.get(name, 0) - counts.get(name, 0) for name in sorted({*counted, *counts})}
    return PassRecord(
        each.name,
        tuple((n, c) for n, c in changes.items() if c),
        peak,
        peak if same else timeline(step, workspace).transient_peak_bytes,
        time.perf_counter() - start,
    ), counted, same


def _written(step: StepGraph) -> set[str]:
    """Parameters and states that an operator writes to, or the host behind them, by their inputs' names."""
    kept = {i.name for i in step.inputs if i.role in (Role.PARAMETER, Role.STATE)}
    later = {step.inputs[i].name for i in step.ahead.written} if step.ahead else set()
    return ({a.name for n in step.computing() for a in mutated_args(n)} | later) & kept


def _unwritten(step: StepGraph, before: set[str]) -> str | None:
    """What is wrong if a parameter or state is not updated any more that was `before`."""
    now = _written(step)
    lost = before - now - {window.rows for window in step.windows if window.full in now}
    if lost:  # unless by a view of it
        roots = storage_roots(step.graph)
        lost -= {root.name for n in step.computing() for a in mutated_args(n) for root in roots[a]}
    labels = {i.name: i.label for i in step.inputs}
    gone = sorted(labels[name] for name in lost if name in labels)
    return f"{', '.join(gone[:3])} is not written any more" if gone else None


def _contents(step: StepGraph) -> list[Any]:
    """The step as objects that are others where a pass has changed it. The peak of the same graph is the same."""
    return [step.module, step.inputs, step.ahead, step.windows,
            *(each for n in step.graph.nodes for each in (n, n.target, n.args, n.kwargs, n.meta.get("val")))]
