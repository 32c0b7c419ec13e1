"""Seconds of operators by running them: the roofline, refined on the device at hand.

Each distinct call (`pieces.label`: operator, shapes, strides, dtypes, constants, device) that a
plan asks for is run on made-up tensors some times, after a warm-up, and has the median. So equal
operators have equal seconds, and equal layers too. What was measured is kept on disk
(`seconds_cache`) and not run again. Operators run one by one: what Inductor fuses takes less than
their sum.

By the roofline stays what

1. is neither PyTorch's own operator nor ours: a user's may do more than compute, and a collective
   would wait for other ranks;
2. has sizes that are not settled;
3. needs more than `ROOM` of the memory that is free;
4. does not take made-up operands;
5. no time is left for, in the order of the schedule. The next plan goes on from there.
"""

from __future__ import annotations

import logging
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from .compat.trace import pytree, real_tensors
from .devices import free_bytes
from .errors import OptionError
from .lowering.pieces import label
from .options import format_bytes
from .progress import stage
from .seconds import Seconds, computes, roofline
from .seconds_cache import SecondsCache
from .stand_ins import copies, stand_ins
from .step_graph import nbytes
from .transfers import BEGINNINGS

log = logging.getLogger("memopt_compile")

NAMESPACES = ("aten", "prims", "memopt")
RUNS = 5  # timed runs of an operator ..
CALLS = 16  # .. each of so many calls at most
OP_SECONDS = 0.1  # for all runs of an operator, unless one call alone takes longer
CACHE = 2**26  # bytes that no cache holds
TOTAL_SECONDS = 30.0  # for all operators of a plan
ROOM = 0.5  # of the free bytes
UNKNOWN_ROOM = 2**30  # bytes, where it is not known what is free


def cost_model(costs: str, device: torch.device) -> Seconds:
    """Seconds on `device` as `Options.costs` asks for them; the roofline's of a device that is not
    there, or that PyTorch gives no clock for."""
    there = device.type == "cpu" or device.type == "cuda" and torch.cuda.is_available()
    return Measured(device) if costs == "measured" and there else roofline(device)


@dataclass
class Measured:
    """Seconds of a node, measured on `device` now or before, else by its roofline (rules 1 to 5).

    Spends about `seconds_left` on measuring. A call keeps the seconds that it had first.
    """

    device: torch.device
    seconds_left: float = TOTAL_SECONDS
    timed: dict[str, float] = field(default_factory=dict)  # by call, of those that were asked for
    others: set[str] = field(default_factory=set)  # that have the roofline's

    def __post_init__(self) -> None:
        self.by_rates, self.cache = roofline(self.device), SecondsCache.of(self.device)
        self.known = self.cache.read()

    def __call__(self, node: fx.Node) -> float:
        if not computes(node):
            return 0.0
        # The same on every device of a kind.
        call = label(node).replace(str(self.device), self.device.type)
        if call not in self.timed and call not in self.others:
            seconds = self.known.get(call) or self._measure(call, node)
            if seconds is None:
                self.others.add(call)
            else:
                self.timed[call] = seconds
        return self.timed.get(call) or self.by_rates(node)

    @property
    def source(self) -> str:
        count = len(self.timed) + len(self.others)
        rest = f", the rest by the {self.by_rates.source}" if self.others else ""
        return (f"{len(self.timed)} of {count} distinct operators measured on "
                f"{self.cache.setup['device']}{rest}")

    def _measure(self, call: str, node: fx.Node) -> float | None:
        """Seconds of the call that `node` is, also written down; None for rules 1 to 5."""
        reason = self._reason(node)
        start = time.perf_counter()
        with stage(f"measuring operators: {len(self.timed)} done, {self.seconds_left:.0f} s left at most"):
            found = None if reason else _seconds(node, self.device)
        self.seconds_left -= time.perf_counter() - start
        if found is None:
            log.debug("%s is not measured: %s", node.target, reason or "it refuses made-up operands")
            return None
        return self.cache.add({call: found})[call]

    def _reason(self, node: fx.Node) -> str | None:
        """Why `node` is not to be run, if so (rules 1, 2, 3 and 5)."""
        if node.target in BEGINNINGS:
            return "it only begins a transfer"
        if node.target.namespace not in NAMESPACES:
            return "it may do more than compute"
        sizes = [n for value in _tensors(node) for n in value.shape]
        if not all(isinstance(n, int) or str(n).isdecimal() for n in sizes):
            return "its sizes are not settled"
        if (needed := _bytes(node)) > _room(self.device):
            return f"it needs {format_bytes(needed)}"
        if 2 * self.by_rates(node) >= self.seconds_left:
            return "no time is left"
        return None


def _room(device: torch.device) -> int:
    try:
        return int(ROOM * free_bytes(device))
    except OptionError:
        return UNKNOWN_ROOM


def _tensors(node: fx.Node) -> list[Tensor]:
    values = [n.meta.get("val") for n in (*node.all_input_nodes, node)]
    return [v for v in pytree.tree_leaves(values) if isinstance(v, Tensor)]


def _bytes(node: fx.Node) -> int:
    return sum(nbytes(v) for v in _tensors(node))


def _seconds(node: fx.Node, device: torch.device) -> float | None:
    """Median seconds of the call that `node` is, on made-up operands; None if it refuses them.

    The calls of a run take turns through copies of the operands and keep their results until its
    end, as a step does: an operand that is still in the cache would flatter what moves bytes.
    """
    cuda = device.type == "cuda"
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
            once, cold = timed(), min(CACHE, _room(device)) // max(_bytes(node), 1)
            count = min(CALLS, cold, int(OP_SECONDS / RUNS / max(once, 1e-9)))
            sets += [copies(sets[0]) for _ in range(count - 1)]
            runs = [once] if once > OP_SECONDS else [timed() for _ in range(RUNS)]
        except (RuntimeError, ValueError, TypeError, IndexError) as error:  # rule 4
            log.debug("%s: %s", node.target, error)
            return None
    return max(statistics.median(runs), 1e-9)
