"""Which passes run on a step, in what order and why; and the runner that checks every one."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from .errors import OptionError, PassError
from .liveness import Workspace, no_workspace, timeline
from .options import Options
from .passes.accumulate_in_states import AccumulateInStates
from .passes.canonicalize import Canonicalize
from .passes.channels_last import ChannelsLast
from .passes.chunk_logits import ChunkLogits
from .passes.compress import Compress
from .passes.honour_checkpoints import HonourCheckpoints
from .passes.plan_memory import PlanMemory
from .passes.recompute import Recompute
from .passes.release_gradients import ReleaseGradients
from .passes.rematerialize_free import RematerializeFree
from .passes.replay_dropout import ReplayDropout
from .passes.reuse_buffers import ReuseBuffers
from .passes.schedule_for_peak import ScheduleForPeak
from .passes.write_back_early import WriteBackEarly
from .rematerialization import Means
from .step_graph import StepGraph
from .step_pass import PassRecord, StepPass


def default(options: Options, lowering: str, limit_bytes: int | None = None,
            device: torch.device | None = None) -> tuple[StepPass, ...]:
    """The passes that `options` ask for. Read it as the story of what happens to a step.

    `limit_bytes` is what its peak shall not exceed on `device`.
    """
    eager = lowering == "eager"
    held = limit_bytes is not None
    means = Means(options.recompute, options.compress, options.max_gradient_error)
    plan = partial(PlanMemory, limit_bytes, device, means, costs=options.costs)
    story = [
        # Tracing left copies and views that eager never made: without them the rest is plain.
        (True, Canonicalize),
        # What the user checkpoints is computed again. (Dropout by PyTorch's own operator can run again
        # once its mask is drawn apart.)
        (eager, ReplayDropout),
        (True, HonourCheckpoints),
        # AdamA, if asked for: a gradient goes into Adam's moments where it is made, not in a sum.
        (options.accumulate == "optimizer_states", AccumulateInStates),
        # A state that several gradients enter is written after each, which then dies.
        (True, WriteBackEarly),
        # What fuses into its reader need not be kept from forward to backward. (In eager nothing
        # fuses, and computing it again costs a little time.)
        (options.recompute, RematerializeFree),
        # Convolutions that would copy every operand into channels-last get it so. What is alive
        # beside them is settled now, so that their workspace can be seen to matter.
        (True, ChannelsLast),
        # Each parameter is updated as soon as its gradient is complete, which then dies.
        (True, ReleaseGradients),
        # Now that updates stand where they are needed, order the whole step by live bytes.
        (True, ScheduleForPeak),
        # Is it too much still? Compute the loss layer for a part of its rows at a time: no operator
        # runs twice for that.
        (held and not eager, partial(ChunkLogits, limit_bytes)),
        # And still? Decide which activations to keep, and compress the others or compute them again.
        (held and eager, partial(ReplayDropout, limit_bytes)),
        # (The eager lowering, an oracle, adds up in another order only if nothing else fits.)
        (held and eager, partial(plan, or_smallest=False)),
        (held and eager, partial(ChunkLogits, limit_bytes)),
        (held, plan),
        (held, Recompute),
        (held, Compress),
        (held, ScheduleForPeak),
        # In the final order, write into dead buffers. Inductor does so by itself.
        (eager, ReuseBuffers),
        # What writes in place needs no buffer of its own: another order may be best now, and
        # that lets other buffers die in time to be written into.
        (eager, ScheduleForPeak),
        (eager, ReuseBuffers),
    ]
    return tuple(make() for wanted, make in story if wanted)


def run(
    step: StepGraph,
    passes: Sequence[StepPass],
    costs: Any = None,
    workspace: Workspace | None = None,
    observe: Callable[[str, StepGraph], None] | None = None,
) -> tuple[PassRecord, ...]:
    """Run `passes` over `step` in place, verifying it before the first and after each.

    `observe` is called with the name of each pass that has run, and the step.

    Raises:
        VerifyError: the step is not sound to begin with.
        PassError: a pass failed, or left something other than it promised.
    """
    step.verify()
    records = []
    with _collector_paused():
        for each in passes:
            records.append(_run_one(step, each, costs, workspace or no_workspace))
            if observe is not None:
                observe(each.name, step)
    return tuple(records)


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


def _run_one(step: StepGraph, each: StepPass, costs: Any, workspace: Workspace) -> PassRecord:
    start = time.perf_counter()
    counts = step.op_counts()
    peak = timeline(step, workspace).transient_peak_bytes
    refusal = each.requires(step)
    if refusal is not None:
        return PassRecord(each.name, (), peak, peak, time.perf_counter() - start, refusal)
    try:
        each.run(step, costs)
        step.verify()
        lack = each.ensures(step)
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
    now = step.op_counts()
    changes = {name: now.get(name, 0) - counts.get(name, 0) for name in sorted({*now, *counts})}
    return PassRecord(
        each.name,
        tuple((n, c) for n, c in changes.items() if c),
        peak,
        timeline(step, workspace).transient_peak_bytes,
        time.perf_counter() - start,
    )
