"""Which passes run on a step, in what order and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from .liveness import Workspace, resident_bytes
from .options import Options
from .pass_runs import Known, Observer, run
from .passes.accumulate_in_states import AccumulateInStates
from .passes.bucket_collectives import BucketCollectives
from .passes.canonicalize import Canonicalize
from .passes.cast_before_gather import CastBeforeGather
from .passes.channels_last import ChannelsLast
from .passes.check_finite import CheckFinite
from .passes.chunk_logits import ChunkLogits
from .passes.compress import Compress
from .passes.dequantize_on_use import DequantizeOnUse
from .passes.gather_again import GatherAgain
from .passes.honour_checkpoints import HonourCheckpoints
from .passes.host_ahead import HostAhead
from .passes.join_backwards import JoinBackwards
from .passes.keep_parameters import KeepParameters
from .passes.offload import Offload
from .passes.overlap_transfers import OverlapTransfers
from .passes.partition_activations import PartitionActivations
from .passes.peel_bias import PeelBias
from .passes.place_in_arena import PlaceInArena
from .passes.plan_memory import PlanMemory
from .passes.prefetch_gathers import PrefetchGathers
from .passes.recompute import Recompute
from .passes.reduce_once import ReduceOnce
from .passes.release_gradients import ReleaseGradients
from .passes.rematerialize_free import RematerializeFree
from .passes.replay_dropout import ReplayDropout
from .passes.reuse_buffers import ReuseBuffers
from .passes.run_in_slabs import RunInSlabs
from .passes.schedule_for_peak import ScheduleForPeak
from .passes.split_live_ranges import SplitLiveRanges
from .passes.stack_padded import StackPadded
from .passes.update_early import UpdateEarly
from .passes.update_in_place import UpdateInPlace
from .passes.write_back_early import WriteBackEarly
from .passes.write_each_update import WriteEachUpdate
from .planning.planner import GAP
from .planning.rematerialization import Means
from .step_graph import StepGraph
from .step_pass import PassRecord, StepPass

ANY = 2**62  # bytes, as a limit
NEARER = (0.02, 0.005)  # of the transient peak: how much less is planned for where nothing fits
TRIES = 8  # of that
NO_FORMATS: Mapping[str, str] = MappingProxyType({})


def default(options: Options, lowering: str, limit_bytes: int | None = None,
            device: torch.device | None = None, free: bool = True, smallest: bool = True, formats: Mapping[str, str] = NO_FORMATS,
            at_most: float = math.inf, in_order: bool = True) -> tuple[StepPass, ...]:
    """The passes that `options` ask for. Read it as the story of what happens to a step.

    `limit_bytes` is what its peak shall not exceed on `device`. Without `free` only the planner says what runs again; with
    `smallest` a plan is taken even if none fits, and none that adds more than `at_most` seconds. `formats` by an activation's
    name are offered in place of "int4 outliers". With `in_order` the eager lowering, an oracle, adds up as the step does.
    """
    eager = lowering == "eager"
    held = limit_bytes is not None
    means = Means(options.recompute, options.compress, options.max_gradient_error,
                  tuple(sorted(formats.items())), options.offload, options.partition_activations)
    stack_padded = partial(StackPadded, (ReleaseGradients(), ScheduleForPeak(), *([ReuseBuffers()] if eager else [])))
    plan = partial(PlanMemory, limit_bytes, device, means, or_smallest=smallest, costs=options.costs, at_most=at_most)
    story = [
        # Tracing left copies and views that eager never made: without them the rest is plain.
        (True, Canonicalize),
        # ZeRO: each gradient is communicated once, in stage 1 for all micro-batches together (unless
        # each of them goes into the states).
        (options.zero > 0, partial(
            ReduceOnce, across=options.zero == 1 and options.accumulate == "gradients")),
        # No update waits for the end of backward because of what it communicates.
        (options.zero > 0, UpdateEarly),
        # Whole parameters stay, and are gathered behind their update, or they come and go.
        (options.zero in (1, 2), KeepParameters),
        (options.zero == 3, CastBeforeGather),
        # What the user checkpoints is computed again (dropout by PyTorch's operator once its mask is drawn apart).
        (eager, ReplayDropout),
        (True, HonourCheckpoints),
        # Backward gathers parameters for itself, also for what it computes again.
        (options.zero == 3, GatherAgain),
        # Small collectives travel together, at most a part of the largest at a time.
        (options.zero > 0, BucketCollectives),
        # AdamA, if asked for: a gradient goes into Adam's moments where it is made, not in a sum.
        (options.accumulate == "optimizer_states", AccumulateInStates),
        # What the host computes of counts and rates goes ahead, or a CUDA graph could not stand for the rest.
        (options.cuda_graphs and device is not None and device.type == "cuda", partial(
            HostAhead, options.cuda_graphs is True, rounds=eager)),
        # A state that several gradients enter is written after each, which then dies.
        (True, WriteBackEarly),
        # Of several updates in a step each is written: parameters and states are there once. (Eager writes all of them in place.)
        # Not where few bits may have the step taken back, before it has written anything.
        (not eager and options.compress is None, WriteEachUpdate),
        # Parameters in low precision are decoded by each reader for itself.
        (True, DequantizeOnUse),
        # Several backwards through one forward go side by side, and let go of activations together.
        (True, JoinBackwards),
        # Gradients of a tensor's members go side by side. (Under a budget a loop over rows is one first, if it has to be.)
        (not held, stack_padded),
        # What fuses into its reader need not be kept from forward to backward. (In eager nothing
        # fuses, and computing it again costs a little time.)
        (free and options.recompute, RematerializeFree),
        # Convolutions that would copy every operand into channels-last get it so. What is alive beside
        # them is settled now, so that their workspace can be seen to matter.
        (True, ChannelsLast),
        # Some need less of it if their bias is added behind them.
        (True, PeelBias),
        # Each parameter is updated as soon as its gradient is complete, which then dies.
        (True, ReleaseGradients),
        # Now that updates stand where they are needed, order the whole step by live bytes.
        (True, ScheduleForPeak),
        # What is still held over the peak for a late reader, and fuses into it, is computed there again.
        (free and options.recompute, SplitLiveRanges),
        # Codes are written where they are.
        (True, UpdateInPlace),
        # Where gradients are added up in place and updates run in slabs, no plan has to find room for more.
        (held and eager, partial(ReuseBuffers, of_gradients=True)),
        (held and eager, partial(RunInSlabs, of_updates=True)),
        # Is it too much still? Backwards that share activations have to come to them together.
        (held, partial(JoinBackwards, limit_bytes)),
        # And still? Compute the loss layer for a part of its rows at a time: no operator runs twice for that.
        (held and not eager, partial(ChunkLogits, limit_bytes)),
        # And still? Decide which activations to keep, compress others or compute them again.
        (held and eager, partial(ReplayDropout, limit_bytes)),
        (held and eager and not in_order, partial(ChunkLogits, limit_bytes)),
        (held, stack_padded),
        (held and eager and not in_order, partial(RunInSlabs, unplanned=True)),
        # Forward's values are what a plan moves; what backward writes in place needs no room in it.
        (held and eager, partial(ReuseBuffers, of_backward=True)),
        # What has been cut in parts has an order of its own.
        (held and eager, ReleaseGradients),
        (held and eager, ScheduleForPeak),
        (held, plan),
        (held, Recompute),
        (held, Compress),
        (held and options.partition_activations, PartitionActivations),
        (held and options.offload, Offload),
        (held, ScheduleForPeak),
        # In the final order, write into dead buffers (Inductor does so by itself).
        (eager, ReuseBuffers),
        # What writes in place needs no buffer of its own: another order may be best now, and
        # that lets other buffers die in time to be written into.
        (eager, ReleaseGradients),
        (eager, ScheduleForPeak),
        (eager, ReuseBuffers),
        # What then still takes a buffer as large as a parameter, to hand it on, is made a slab at a time.
        (eager, RunInSlabs),
        # Copies to and from the host go on beside other work, as far as the budget has room.
        (held and options.offload, partial(OverlapTransfers, limit_bytes, device)),
        # So does what ranks gather: the next parameter comes while this layer computes.
        (held and options.zero == 3, partial(PrefetchGathers, limit_bytes)),
        # What few bits cannot hold has the step taken back, before it has written anything.
        (held and options.compress is not None, CheckFinite),
        # Now that nothing moves any more, what ranks send and gather gets places in one buffer.
        (options.arena, partial(PlaceInArena, products_only=not eager)),
    ]
    return tuple(make() for wanted, make in story if wanted)


def rewritten(step: StepGraph, options: Options, lowering: str, workspace: Workspace, limit_bytes: int | None = None,
              device: torch.device | None = None, observe: Observer | None = None, formats: Mapping[str, str] = NO_FORMATS,
              known: Known | None = None, free: bool | None = None) -> tuple[StepGraph, tuple[PassRecord, ...]]:
    """The step after the `default` passes, and their records. `step` itself is changed without a limit only.

    Where nothing fits, it is planned in other ways, and the smallest peak is taken:

    - with formats that lose something, less what `check_finite` keeps copies of, and without these formats: plans with
      them are not mended, and look for the smallest peak among more;
    - by the eager lowering, in either way, for less than the smallest peak so far (`NEARER`): the smallest plan is looked for in larger
      steps, and passes behind a plan can make less of one that is not the smallest itself. A larger budget would come by it.

    `known`, of one step and lowering, has what passes in front of the plan have made of it. `free` says with or without free
    recomputation, and only that way is gone.
    """
    if limit_bytes is None:
        return step, run(step, default(options, lowering, device=device, formats=formats), workspace, workspace, observe)
    known = known or Known()

    def within(options: Options, limit: int, observe: Observer | None = None, smallest: bool = True
               ) -> tuple[StepGraph, tuple[PassRecord, ...]]:
        return _within(step, options, lowering, workspace, limit, device, observe, formats, known, free, smallest)

    found, way = within(options, limit_bytes, observe), (options, limit_bytes)
    if free is not None:
        return found
    copies = sum(r.peak_after - r.peak_before for r in found[1] if r.name == CheckFinite.name)
    others = [(options, limit_bytes - copies)] if copies else []
    if options.compress and not formats:  # else there is a plan already
        others.append((replace(options, compress=None, adapt=False), limit_bytes))
    for other in others:
        if peak_of(found) > limit_bytes and peak_of(rival := within(*other)) < peak_of(found):
            found, way = rival, other
    resident, shares = resident_bytes(step), NEARER if lowering == "eager" else ()
    for _ in range(TRIES):
        if not shares or (least := peak_of(found)) <= limit_bytes:
            break
        nearer = max(limit_bytes, least - 1 - int(shares[0] * (least - resident)))
        better = ((rival, (each, nearer)) for each in dict.fromkeys((way[0], options))
                  if peak_of(rival := within(each, nearer, smallest=False)) < least)
        found, way = next(better, (found, way))
        shares = shares[peak_of(found) == least:]
    if way == (options, limit_bytes):
        return found
    if observe:
        found = within(*way, observe)  # it is told of what is taken last
    if plan := found[0].plan:
        found[0].plan = replace(plan, limit_bytes=plan.limit_bytes + limit_bytes - way[1])
    return found


def _within(step: StepGraph, options: Options, lowering: str, workspace: Workspace, limit_bytes: int,
            device: torch.device | None, observe: Observer | None, formats: Mapping[str, str], known: Known,
            free: bool | None, smallest: bool) -> tuple[StepGraph, tuple[PassRecord, ...]]:
    """The step as it is planned for `limit_bytes`.

    What is computed again for free may be in the way of a tight limit: whole chains of it can be alive at once, and the
    planner does not take them back. So all of it is left to the planner too. And a plan that adds up as the step does may
    have to compute much again for logits that are there whole. Of all ways the one that adds least time is taken, or else a
    smaller limit could have the faster step. If none fits the smallest peak is; it is not looked for unless `smallest`.
    """
    chosen = partial(default, options, lowering, limit_bytes, device, formats=formats)

    def by(passes: Sequence[StepPass], observe: Observer | None) -> tuple[StepGraph, tuple[PassRecord, ...]]:
        plan, twin = _place_of_plan(passes), step.copy()
        before = run(twin, passes[:plan], workspace, workspace, observe, known)
        return twin, before + run(twin, passes[plan:], workspace, workspace, observe)

    if free is not None:
        return by(chosen(free=free, in_order=False), observe)
    if lowering == "eager" and smallest:  # a step may fit only once it writes into dead buffers, which no plan foresees
        found = by(default(options, lowering, ANY, device, formats=formats), observe)
        if peak_of(found) <= limit_bytes:
            return found
    orders = ({}, {"in_order": False}) if lowering == "eager" else ({},)
    ways = [order | how for how in ({}, {"free": False})[:1 + options.recompute] for order in orders]
    told: Any = None  # the way that `observe` has seen last: it is to be the one that is taken

    def whole(way: dict[str, bool], **settings: Any) -> tuple[StepGraph, tuple[PassRecord, ...]]:
        nonlocal told
        told = way
        return by(chosen(**way, **settings), observe)

    def planned(way: dict[str, bool], at_most: float = math.inf) -> tuple[StepGraph, tuple[PassRecord, ...]] | None:
        """None if there is no plan or it is not enough."""
        if at_most < math.inf or lowering == "eager":  # seldom taken: unseen, and no further than the plan
            passes = chosen(**way, smallest=False, at_most=at_most)
            begun = by(passes[:1 + _place_of_plan(passes)], None)
            if begun[0].plan is None and peak_of(begun) > limit_bytes:
                return None
        return ended if peak_of(ended := whole(way, smallest=False, at_most=at_most)) <= limit_bytes else None

    way, found = next(((way, found) for way in ways if (found := planned(way))), (ways[-1], None))
    if found is None:
        if not smallest:
            return whole(way, smallest=False)
        way, found = min(((way, whole(way)) for way in ways[len(orders) - 1::len(orders)]), key=lambda each: peak_of(each[1]))
        return found if told is way else whole(way)
    changed, bound = {r.name for r in found[1] if r.op_changes}, math.inf
    for other in ({"in_order": False}, {"free": False}):
        if (rival := way | other) in ways and rival != way and ("free" not in other or RematerializeFree.name in changed):
            if not (found[0].plan and found[0].plan.seconds):
                break
            if faster := planned(rival, at_most := found[0].plan.seconds * (1 - GAP)):
                found, way, bound = faster, rival, at_most
    return found if told is way or observe is None else whole(way, smallest=False, at_most=bound)


def peak_of(found: tuple[StepGraph, Sequence[PassRecord]]) -> int:
    """Predicted peak in bytes of a step as its passes have left it."""
    return resident_bytes(found[0]) + found[1][-1].peak_after


def behind_compression(options: Options, lowering: str, limit_bytes: int, device: torch.device) -> tuple[StepPass, ...]:
    """Those of the `default` passes that follow `Compress`."""
    passes = default(options, lowering, limit_bytes, device)
    return passes[[type(each) for each in passes].index(Compress) + 1:]


def _place_of_plan(passes: Sequence[StepPass]) -> int:
    return next(i for i, each in enumerate(passes) if isinstance(each, PlanMemory))
