"""From a captured step to a program whose peak fits: passes, budget, lowering.

A plan is made for the schedule; what its lowering then needs is known exactly before anything runs.
Where that is over the budget the step is planned again for less, by rungs of a ladder that is the same for
all budgets: what a budget could take, a larger one comes by first, so that no smaller one has a faster step.
Where lowering makes less of a schedule a larger budget may take what it leaves room for: so the ladder begins
some rungs above the budget, or the smaller one would not come by and have more bytes and seconds than need be.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from . import data_sizes, devices, pipelines
from .backends import eager, inductor
from .checks import is_check
from .compat.sizes import polynomial
from .costs import workspace as workspace_of
from .errors import InfeasibleBudget, OptionError
from .finiteness import REQUIRE_FINITE, falling_back
from .liveness import Timeline, resident_bytes, timeline
from .lowering.ahead import Ahead
from .lowering.replaying import Replayed
from .memory_plan import MemoryPlan
from .metadata import check_metadata, write_sizes_out
from .optim.low_bit import SMALL
from .options import format_bytes
from .passes.chunk_logits import ChunkLogits
from .passes.rematerialize_free import RematerializeFree
from .planning.adaptation import Adaptive, Program, Watch
from .progress import stage
from .records import Compilation, captured_only, nothing_runs
from .reporting.render import alive_at_peak
from .shadow import shadowed
from .step_graph import Role, StepGraph, is_collective

log = logging.getLogger("memopt_compile")
RUNGS = 200  # that the transient peak of the captured step is divided in
TRIES = 12  # for a step whose lowered peak is above the budget
NEAR = 4  # rungs: how much more than its schedule a lowered plan may need without another being left out
ABOVE = 6  # rungs, the budget's own among them: how much less it may need without being left out itself
NEARER = 24  # limits that a refused budget is planned for, between the smallest schedule and above the smallest program
SHOWN = 3  # kinds of values that a refusal names

Tried = dict[int, tuple[Program, StepGraph, Timeline, tuple]]  # by the limit that was planned for, the largest first


def fitted(step: StepGraph, record: Compilation) -> Callable:
    """The program of one step graph, a boxed callable.

    Raises:
        InfeasibleBudget: no plan was found that fits.
        OptionError: `adapt` is asked for and the step has collectives, or `offload` or `cuda_graphs` and it
            is on the CPU.
    """
    record.before = before = timeline(step, workspace_of(step, record.lowering))
    record.step = step
    _check(step, record)
    if captured_only():
        record.captured = step
        return eager.lower(step)
    record.observe("captured", step)
    if record.lowering == "inductor" and any(map(is_check, step.computing())):
        _fix_sizes(step)  # with symbols among them Inductor has one piece, and no order of checks and writes
    budget, limit = record.options.memory_budget, None
    if budget is None or isinstance(budget, float) and record.kind == "evaluation":  # a share is of what can be given up
        program = _program(step, record, None)
    else:
        limit = devices.budget_bytes(budget, before.peak_bytes, record.device, before.resident_bytes)
        record.budget_bytes = limit
        _fix_sizes(step)
        program = _nearest(limit, step, record)
    record.dump()
    if limit is not None and program.peak_bytes > limit:
        with stage("over the budget, looking for what would fit"):
            raise _refusal(step, record)
    if record.device.type == "cpu" and not nothing_runs():
        devices.keep_freed_bytes(record.predicted_peak_bytes - record.after.resident_bytes)
    program, plan = _measured(program, record), record.step.plan
    run: Callable = program.run
    if program.watched:
        run = Adaptive(program, partial(_planned_again, step, record), record.where, record.history)
    if program.watched or any(n.target is REQUIRE_FINITE for n in record.step.computing()):  # or in a later plan
        run = falling_back(run, partial(_exactly, step, record), record.device)
    if run is program.run:  # it will not be planned again
        record.known.clear()
    run = _compared(run, plan, record.versions, record)
    asked = record.options.cuda_graphs is True
    if asked or record.options.cuda_graphs and record.device.type == "cuda" and run is program.run:
        run = record.replayed = Replayed(run, record.step, record.device, record.where, program.peak_bytes, limit, asked)
    return Ahead(run, record.step, record.where) if record.step.ahead else run


def _check(step: StepGraph, record: Compilation) -> None:
    """Raises OptionError where an option does not go with the step or its device."""
    options, device = record.options, record.device.type
    for option, wrong, why, do in (
        ("cuda_graphs", device != "cuda", f"the step runs on the {device}, which has no CUDA graphs",
         "leave cuda_graphs out"),
        ("cuda_graphs", data_sizes.are_in(step.graph), "only the data tell a size in it, and a CUDA graph has its sizes",
         "leave cuda_graphs out, or compute with all rows"),
        ("offload", device == "cpu", "the step runs on the CPU: its activations are in the host's memory as it is",
         "leave offload out"),
        ("adapt", any(map(is_collective, step.computing())),
         "ranks see different activations, and would plan differently", "leave adapt out of a step with collectives"),
    ):
        if getattr(options, option) is True and wrong:
            raise OptionError(why, where=f"{record.where}, {option}=True", do=do)


def _nearest(limit: int, captured: StepGraph, record: Compilation) -> Program:
    """The same as `_within`. Where nothing fits, limits from above the smallest program to the smallest schedule are planned for:
    lowering may make less of a plan among them than its schedule lets expect."""
    tried: Tried = {}
    program = _within(limit, captured, record, tried=tried)
    least = program.peak_bytes
    if record.lowering == "eager" or least <= limit:
        return program
    floor, rung = min(after.peak_bytes for _, _, after, _ in tried.values()), _rung(record)
    log.info("%s: %s is the smallest peak so far, looking for less", record.where, format_bytes(least))
    planned = _down(max(least, floor), record) + ABOVE * rung  # copies to take a step back count in schedules alone
    step = rung * max(1, -(-(planned - floor) // (NEARER * rung)))
    while planned > floor and least > limit:
        if planned not in tried:
            record.budget_bytes = least - 1  # what needs more is not lowered to its end
            program = _program(captured, record, planned)
            tried[planned] = program, record.step, record.after, record.passes
            least = min(least, program.peak_bytes)
        # The same schedule would come of a rung that it is below already.
        planned = _down(min(planned, tried[planned][2].peak_bytes) - 1 - (step - rung), record)
    record.budget_bytes = limit
    return _smallest(tried, record)


def _rung(record: Compilation) -> int:
    """Bytes between two limits that plans are made for."""
    return max(1, (record.before.peak_bytes - record.before.resident_bytes) // RUNGS)


def _down(limit: int, record: Compilation) -> int:
    """The next of these limits, the same for all budgets, so that a larger one has the plans of a smaller one too."""
    return limit - (limit - record.before.resident_bytes) % _rung(record)


def _within(limit: int, captured: StepGraph, record: Compilation,
            formats: Mapping[str, str] = pipelines.NO_FORMATS, tried: Tried | None = None) -> Program:
    """The program of `captured` that is planned for `limit` bytes of peak, if that is possible.

    Inductor allocates a little otherwise than the schedule says: how much, only its code tells. And
    what looks at activations has some bytes of its own. If nothing fits, `record` and the program are
    those with the smallest peak, of all that were `tried` for this limit and larger ones before.
    """
    resident, rung = record.before.resident_bytes, _rung(record)
    tried = {} if tried is None else tried
    if record.lowering == "eager":  # it runs what is planned
        above, highest = 0, limit
        planned = limit
    else:
        above, highest = ABOVE * rung, _down(limit, record) + ABOVE * rung
        # Fusion may make any share less of it.
        planned = max(highest, _unplanned_peak(captured, record, formats))
    for attempt in range(1 + TRIES):
        if planned not in tried:
            program = _program(captured, record, planned, formats)
            tried[planned] = program, record.step, record.after, record.passes
        program, record.step, record.after, record.passes = tried[planned]
        if program.peak_bytes <= limit:
            return program
        if planned <= highest and not (program.plan.fits if program.plan else record.after.peak_bytes <= planned):
            break  # no plan has less
        if record.options.compress and record.lowering == "eager" and not program.watching:
            break  # what copies it takes to take it back has been planned for
        excess = program.peak_bytes - limit
        log.info("%s: %s over the budget once lowered, planning again", record.where, format_bytes(excess))
        # The same schedule would come of a rung that it is below already. (With an arena it is above.)
        lower = min(planned, record.after.peak_bytes) - max(1, excess - above - NEAR * rung)
        planned = min(highest, _down(lower, record)) if attempt < TRIES - 1 else resident
    return _smallest(tried, record)


def _smallest(tried: Tried, record: Compilation) -> Program:
    """The one of these with the smallest peak, which `record` is of then. It is lowered whole: where only a part was, the peak
    is at least what is known."""
    while True:
        planned, (program, step, *more) = min(tried.items(), key=lambda each: each[1][0].peak_bytes)
        parts = {name: part for name in ("run", "watching") if isinstance(
            part := getattr(program, name), inductor.TooLarge)}
        if not parts:
            record.step, record.after, record.passes = step, *more
            record.predicted_peak_bytes = program.peak_bytes
            return program
        whole = {name: _whole_of(part) for name, part in parts.items()}
        peaks = [resident_bytes(step) + inductor.predicted_transient_peak(lowered) for lowered in whole.values()]
        tried[planned] = replace(program, peak_bytes=max(program.peak_bytes, *peaks), **whole), step, *more


def _whole_of(lowered: Callable | inductor.TooLarge) -> Any:
    return lowered.lowered() if isinstance(lowered, inductor.TooLarge) else lowered


def _unplanned_peak(captured: StepGraph, record: Compilation, formats: Mapping[str, str]) -> int:
    """Bytes that the schedule of `captured` needs if nothing is done for a budget."""
    workspace = workspace_of(captured, record.lowering)
    with stage("planning"):
        step, _ = pipelines.rewritten(captured, record.options, record.lowering, workspace, pipelines.ANY, record.device,
                                      None, formats, record.known)
    return timeline(step, workspace).peak_bytes


def _program(step: StepGraph, record: Compilation, limit: int | None,
             formats: Mapping[str, str] = pipelines.NO_FORMATS) -> Program:
    """The program of `step`, planned to have a peak of at most `limit` bytes if that is possible."""
    workspace, watch = workspace_of(step, record.lowering), Watch(record.options.compress)

    def observe(name: str, step: StepGraph) -> None:
        record.observe(name, step)
        if record.options.adapt:
            watch.observe(name, step)

    with stage("passes" if limit is None else f"planning for {format_bytes(limit)}"):
        step, record.passes = pipelines.rewritten(step, record.options, record.lowering, workspace, limit,
                                                  record.device, observe, formats, record.known)
    record.step, record.after = step, timeline(step, workspace)
    if record.options.verify:
        check_metadata(step)
    run, peak = _lowered(step, record)
    program = Program(run, step.plan, peak)
    if step.plan and watch.watched:
        def counting() -> tuple[Callable | inductor.TooLarge, int]:
            pipelines.run(watch.step, pipelines.behind_compression(
                record.options, record.lowering, limit, record.device), costs=workspace, workspace=workspace)
            return _lowered(watch.step, record)

        if isinstance(run, inductor.TooLarge):  # this one is not lowered unless the smallest peak is asked for
            watching, with_counts = inductor.TooLarge(run.least_bytes, lambda: _whole_of(counting()[0])), peak
        else:
            watching, with_counts = counting()
        program = Program(run, step.plan, max(peak, with_counts), watching, watch.watched)
    record.predicted_peak_bytes = program.peak_bytes
    return program


def _lowered(step: StepGraph, record: Compilation) -> tuple[Callable | inductor.TooLarge, int]:
    """A boxed callable, and the bytes of its peak; or what is known of a program that is over the budget."""
    if record.lowering == "eager":
        return eager.lower(step), timeline(step, workspace_of(step, "eager")).peak_bytes
    limit, resident = record.budget_bytes, resident_bytes(step)
    # With a budget this may be one try of several: kernels are for the one that is taken. Without, it has not to need more than in eager.
    lowered = inductor.lower(step, whole=not record.options.pieces, later=nothing_runs(),
                             within=None if limit is None else limit - resident, aim=record.before.peak_bytes - resident)
    known = lowered.least_bytes if isinstance(lowered, inductor.TooLarge) else inductor.predicted_transient_peak(lowered)
    return lowered, resident + known


def _planned_again(captured: StepGraph, record: Compilation, formats: Mapping[str, str]) -> Program | None:
    """Another program of the step, which `record` is of from now on; None if none fits."""
    limit = record.budget_bytes or 0
    trial = replace(record, texts={}, versions={})
    program = _within(limit, captured, trial, formats)
    if program.peak_bytes > limit:
        return None
    record.step, record.after, record.passes = trial.step, trial.after, trial.passes
    record.predicted_peak_bytes, record.measured_peak_bytes = program.peak_bytes, None
    program = _measured(program, record)
    # The next step is watched.
    return replace(program, watching=program.watching and _compared(program.watching, program.plan, trial.versions, record))


def _compared(run: Callable, plan: MemoryPlan | None, versions: Mapping[str, StepGraph], record: Compilation) -> Callable:
    """`run`, whose first call also compares the gradients of `versions`, if `verify` is asked for and formats lose something."""
    if not (versions and plan and plan.largest_error):
        return run
    return shadowed(run, versions["plan_memory"], versions["compress"], record.options.max_gradient_error, record.where,
                    record.compressed)


def _measured(program: Program, record: Compilation) -> Program:
    _finish(program)
    watching = program.watching and record.measured(program.watching)
    return replace(program, run=_with_arena(record.measured(program.run), record), watching=watching)


def _finish(program: Program) -> None:
    """Have the kernels of `program` compiled, if it is to run."""
    for run in (program.run, program.watching):
        if isinstance(run, inductor.Lowered) and not nothing_runs():
            run.finish()


def _with_arena(run: Callable, record: Compilation) -> Callable:
    """`run`, a boxed callable, given the arena behind its other inputs if its step has one."""
    arena = record.step.inputs[-1] if record.step.inputs else None
    if arena is None or arena.role is not Role.ARENA:
        return run

    def run_with_arena(inputs: list) -> Any:
        inputs.append(record.arena.of(arena.nbytes, record.device))
        return run(inputs)

    run_with_arena._boxed_call = True  # type: ignore[attr-defined]
    return torch.compiler.disable(run_with_arena)


def _exactly(captured: StepGraph, record: Compilation) -> Callable:
    """The program of the same step with no activation in a lossy format."""
    if record.exact is None:
        options = replace(record.options, compress=None, adapt=False, verify=False, dump=None)
        exact = Compilation(record.kind, options, record.lowering, record.where, device=record.device,
                            before=record.before, known=record.known, arena=record.arena,
                            budget_bytes=record.budget_bytes)
        limit = record.budget_bytes or 0
        program = _within(limit, captured, exact)
        _finish(program)
        record.exact = _with_arena(program.run, exact)
        log.warning("%s: an activation is not finite, which few bits cannot hold: the step was taken back "
                    "and runs exactly, as all such steps will; its peak is then %s, the budget %s",
                    record.where, format_bytes(exact.predicted_peak_bytes or 0), format_bytes(limit))
    record.taken_back += 1
    return record.exact


def _fix_sizes(step: StepGraph) -> None:
    """Have every batch size compiled, and so planned, by itself: what fits one may not fit another. A count of steps
    is no size."""
    sizes = {symbol for node in step.graph.nodes for size in getattr(node.meta.get("val"), "shape", ())
             if isinstance(size, torch.SymInt) for symbol in polynomial(size).free_symbols}
    for node in step.placeholders:
        if isinstance(node.meta["val"], torch.SymInt) and polynomial(node.meta["val"]).free_symbols & sizes:
            int(node.meta["val"])  # Dynamo guards on what is asked
    write_sizes_out(step)


def _refusal(captured: StepGraph, record: Compilation) -> InfeasibleBudget:
    """What is in the way of the budget, and what each way to need less would come to."""
    limit, plan = record.budget_bytes or 0, record.step.plan
    needed, resident = record.predicted_peak_bytes, record.after.resident_bytes
    means = "the smallest peak found"
    ways = {"computing activations again": plan and plan.again, "keeping them in fewer bits": plan and plan.largest_error,
            "in parts by several ranks": plan and plan.chosen("partition"),
            "in host memory": plan and plan.chosen("offload")}
    if used := [way for way, is_used in ways.items() if is_used]:
        means += f", by {' and '.join(used)},"
    if not record.options.recompute:
        means += " (recompute=False)"
    less = [f"raise memory_budget to {format_bytes(needed, enough=True)}"]
    if resident < limit:
        less.append("halve the batch, or split it with memopt.micro_batches: about "
                    f"{format_bytes(needed - (needed - resident) // 2)}, if what the step holds beyond its "
                    f"inputs, {format_bytes(needed - resident)}, is in proportion to the batch")
    others = {"compress": ("int4", "by activations in fewer bits, with which gradients differ a little")}
    if record.device.type == "cuda":
        others["offload"] = True, "by activations that wait in the host's memory, unchanged"
    # By the way that came nearest without them: it is not worth as long a search again.
    free = any(each.name == RematerializeFree.name for each in record.passes)
    for option, (setting, how) in others.items():
        if not getattr(record.options, option) and resident < limit:
            workspace = workspace_of(captured, record.lowering)
            step, _ = pipelines.rewritten(captured, replace(record.options, **{option: setting}),
                                          record.lowering, workspace, limit, record.device, known=record.known, free=free)
            if (peak := timeline(step, workspace).peak_bytes) < needed:
                less.append(f"allow {option}={setting!r}: {format_bytes(peak)}, {how}")
    states = [n.meta["val"] for i, n in zip(record.step.inputs, record.step.placeholders) if i.role is Role.STATE]
    wide = sum(v.nbytes for v in states  # a count of steps may be no tensor
               if isinstance(v, torch.Tensor) and v.dtype is torch.float32 and v.numel() >= SMALL)
    if saved := wide * 3 // 4:
        less.append(f"an optimizer of memopt.optim with state_bits=8: about {format_bytes(needed - saved)}, by keeping "
                    f"a quarter of {format_bytes(wide)} of optimizer state in float32")
    return InfeasibleBudget(
        f"{means} is {format_bytes(needed)} and the budget is {format_bytes(limit)}, "
        f"{format_bytes(needed - limit)} less; "
        f"{format_bytes(resident)} are there before the step begins: parameters, optimizer state, "
        f"buffers and the batch{_largest(record)}{_whole(record)}", where=record.peak_line(), do="; or ".join(less),
        budget_bytes=limit, smallest_peak_bytes=needed, resident_bytes=resident)


def _whole(record: Compilation) -> str:
    """Why the loss layer is not computed in parts, if it has logits."""
    why = next((r.refusal for r in record.passes if r.name == ChunkLogits.name and r.refusal), None)
    return f"; the widest product is there whole: {why}" if why and not why.startswith("no ") else ""


def _largest(record: Compilation) -> str:
    """The values that take most of the smallest peak beside the step's inputs, equal ones together."""
    alive = alive_at_peak(record.step, record.after)
    kinds = Counter((each.bytes, each.value, each.phase, each.line or each.name) for each in alive)
    shown = sorted(kinds, key=lambda kind: -kinds[kind] * kind[0])[:SHOWN]
    return "; the largest beside these at that peak are " + ", ".join(
        f"{(times := kinds[size, value, phase, line])} × {value} of {phase} ({format_bytes(times * size)}, {line})"
        for size, value, phase, line in shown) if shown else ""
