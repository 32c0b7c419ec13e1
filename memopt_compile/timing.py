"""Seconds of operators by running them: the roofline, refined on the device at hand.

Each distinct call (`pieces.label`: operator, shapes, strides, dtypes, constants, device) is run on
made-up tensors some times, after a warm-up, and has the median. So equal operators have equal
seconds, and equal layers too. What was measured is kept on disk (`seconds_cache`) and not run
again. Operators run one by one: what Inductor fuses takes less than their sum.

By the roofline stays what

1. is not one of PyTorch's own operators: others may do more than compute, and a collective would
   wait for other ranks;
2. has sizes that are not settled;
3. needs more than `ROOM` of the memory that is free;
4. does not take made-up operands;
5. no time is left for. The longest come first, and the next plan goes on with the others.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from .compat_trace import pytree, real_tensors
from .devices import free_bytes
from .errors import OptionError
from .options import format_bytes
from .pieces import label
from .seconds import Seconds, computes, roofline
from .seconds_cache import SecondsCache
from .stand_ins import copies, stand_ins
from .step_graph import nbytes

log = logging.getLogger("memopt_compile")

NAMESPACES = ("aten", "prims")
RUNS = 5  # timed runs of an operator ..
CALLS = 16  # .. each of so many calls at most
OP_SECONDS = 0.1  # for all runs of an operator, unless one call alone takes longer
CACHE = 2**26  # bytes that no cache holds
TOTAL_SECONDS = 30.0  # for all calls of a plan
TELL_SECONDS = 5.0  # between two lines of progress
ROOM = 0.5  # of the free bytes
UNKNOWN_ROOM = 2**30  # bytes taken to be free where that is not known


def cost_model(costs: str, nodes: Iterable[fx.Node], device: torch.device) -> Seconds:
    """Seconds of `nodes` as `Options.costs` asks for them; the roofline's of a device that is not
    there, or that PyTorch gives no clock for."""
    there = device.type == "cpu" or device.type == "cuda" and torch.cuda.is_available()
    return measured(nodes, device) if costs == "measured" and there else roofline(device)


def measured(nodes: Iterable[fx.Node], device: torch.device,
             total_seconds: float = TOTAL_SECONDS) -> Seconds:
    """Seconds of `nodes`, measured on `device` now or before, else by its roofline (rules 1 to 5).

    Takes about `total_seconds` at most. Other nodes have the roofline's.
    """
    by_rates, cache = roofline(device), SecondsCache.of(device)
    calls: dict[str, fx.Node] = {}
    for node in nodes:
        if computes(node):
            calls.setdefault(_text(node, device), node)
    known = cache.read()
    new = [call for call, node in calls.items() if call not in known and _may_run(node)]
    if new:
        new.sort(key=lambda call: -by_rates(calls[call]))
        found = _measure({call: calls[call] for call in new}, by_rates, device, total_seconds)
        known = cache.add(found)
    timed = sum(call in known for call in calls)
    rest = "" if timed == len(calls) else f", the rest by the {by_rates.source}"
    return Seconds(
        lambda node: known.get(_text(node, device)) or by_rates(node),
        f"{timed} of {len(calls)} distinct operators measured on {cache.setup['device']}{rest}")


def _text(node: fx.Node, device: torch.device) -> str:
    """The call as text, the same on every device of a kind."""
    return label(node).replace(str(device), device.type)


def _may_run(node: fx.Node) -> bool:
    """Rules 1 and 2."""
    sizes = (n for value in _tensors(node) for n in value.shape)
    return (node.target.namespace in NAMESPACES
            and all(isinstance(n, int) or str(n).isdecimal() for n in sizes))


def _tensors(node: fx.Node) -> list[Tensor]:
    values = [n.meta.get("val") for n in (*node.all_input_nodes, node)]
    return [v for v in pytree.tree_leaves(values) if isinstance(v, Tensor)]


def _measure(calls: dict[str, fx.Node], by_rates: Seconds, device: torch.device,
             total_seconds: float) -> dict[str, float]:
    """Seconds of those `calls` that can be run before `total_seconds` are over (rules 3 to 5)."""
    try:
        room = int(ROOM * free_bytes(device))
    except OptionError:
        room = UNKNOWN_ROOM
    log.info("measuring %d operators, for %.0f s at most", len(calls), total_seconds)
    found: dict[str, float] = {}
    start = told = time.perf_counter()
    for number, (call, node) in enumerate(calls.items()):
        now = time.perf_counter()
        if now - told > TELL_SECONDS:
            log.info("measured %d of %d operators", number, len(calls))
            told = now
        left = total_seconds - (now - start)
        if left <= 0:  # rule 5
            log.info("no time left to measure %d operators", len(calls) - number)
            break
        needed = sum(nbytes(v) for v in _tensors(node))
        if 2 * by_rates(node) > left:
            log.info("no time left to measure %s", node.target)
        elif needed > room:  # rule 3
            log.info("%s needs %s and is not measured", node.target, format_bytes(needed))
        elif (seconds := _seconds(node, device, room)) is not None:
            found[call] = seconds
    return found


def _seconds(node: fx.Node, device: torch.device, room: int) -> float | None:
    """Median seconds of the call that `node` is, on made-up operands; None if it refuses them.

    The calls of a run take turns through copies of the operands and keep their results until its
    end, as a step does: an operand that is still in the cache would flatter what moves bytes.
    """
    cuda = device.type == "cuda"
    needed = sum(nbytes(v) for v in _tensors(node))
    operands: Any = pytree.tree_map_only(fx.Node, lambda n: n.meta.get("val"),
                                         (tuple(node.args), dict(node.kwargs)))

    def timed() -> float:
        start = time.perf_counter()
        results = [node.target(*args, **kwargs) for args, kwargs in sets]
        if cuda:
            torch.cuda.synchronize(device)
        taken = time.perf_counter() - start
        del results
        return taken / len(sets)

    with (real_tensors(), torch.random.fork_rng([device] if cuda else []), torch.no_grad(),
          torch.autocast(device.type, enabled=False)):
        try:
            sets = [stand_ins(operands, random=True)]
            timed()  # libraries set themselves up in their first call
            once, cold = timed(), min(CACHE, room) // max(needed, 1)
            count = min(CALLS, cold, int(OP_SECONDS / RUNS / max(once, 1e-9)))
            sets += [copies(sets[0]) for _ in range(count - 1)]
            runs = [once] if once > OP_SECONDS else [timed() for _ in range(RUNS)]
        except (RuntimeError, ValueError, TypeError, IndexError) as error:  # rule 4
            log.debug("%s is not measured: %s", node.target, error)
            return None
    return max(statistics.median(runs), 1e-9)
