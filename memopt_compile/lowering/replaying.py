"""A step on CUDA recorded as one CUDA graph and launched whole from then on (`cuda_graphs`).

To launch kernels one by one takes the host some microseconds each, and to call a piece some thirty
(docs/results/launches.md). A device that is done sooner waits. Rules:

1. The device's tensors and numbers are all that the step reads (`recordable`): a graph replays kernels, and neither
   Python nor the host's arithmetic, nor what it draws: what it computes of counts and rates goes ahead (`passes.host_ahead`).
   Random numbers of the device go on, as PyTorch's generators know of graphs.
2. Parameters, states and buffers are read and written where they are. The batch is copied into buffers of
   the graph's own, and results are handed out as copies: the next replay writes over them.
3. When one of them has moved, or a number of the host that did not go ahead has changed, the step is recorded
   again, `RECORDINGS` times in all; what changes more often runs unrecorded.
4. A graph keeps the memory that the step frees, between steps too. All graphs on a device share one pool, as no
   two run at once. With a budget the pool counts: where it does not fit, the step runs unrecorded.
5. Unless it was asked for (`cuda_graphs=True`), what a graph keeps is at most `LITTLE` of the device's memory and at
   least as much is left free: what runs between steps would miss it.
6. Within `memopt.measure` the step runs unrecorded, since nobody sees what a graph holds; so it does in a recording of
   the caller's own.
7. A first recording is a rehearsal and thrown away (`rehearse`): one that fails must leave no trace.

The numbers are the same: the same kernels run in the same order.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..compat.recording import give_up_pool
from ..measure import being_measured
from ..options import format_bytes
from ..recordable import obstacle
from ..step_graph import Role, StepGraph

log = logging.getLogger("memopt_compile")

WARM = 2  # runs before: Triton tunes its kernels in the first, and the second is measured
RECORDINGS = 3
LITTLE = 0.1  # of the device's memory
RESULTS = 0.01, 2**20  # of the step's peak, bytes: results that need more than both are not worth copies


@functools.cache
def _pool(device: torch.device) -> Any:
    return torch.cuda.graph_pool_handle()


def recorded(run: Callable[[list], Any], held: list, pool: Any) -> tuple[Any, Any]:
    """A graph of `run(held)`, and its results."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        return graph, run(list(held))


def rehearse(run: Callable[[list], Any], held: list, device: torch.device) -> None:
    """Record `run(held)` for nothing; whatever forbids it is raised, and the process is as before.

    A recording that fails has the stream of recordings stay current, the allocator wait for its end, and the generator
    of random numbers refuse to draw ever again: that is a stand-in, with numbers like the device's own.
    """
    generator = torch.cuda.default_generators[device.index]
    own, pool = generator.graphsafe_get_state(), torch.cuda.graph_pool_handle()
    generator.graphsafe_set_state(own.clone_state())
    try:
        with torch.cuda.stream(torch.cuda.current_stream(device)):
            recorded(run, held, pool)
    except Exception:
        give_up_pool(device, pool)
        raise
    finally:
        generator.graphsafe_set_state(own)


@dataclass(eq=False)
class Replayed:
    """A boxed callable like `run`, of `step`, from the call after `WARM` on by a graph.

    `limit` is the most bytes that the step may have, `peak_bytes` what it needs at its peak; `state` says for
    people how it runs, and each reason not to replay is logged once, with `where`: as a warning if it was `asked` for.
    """

    run: Callable[[list], Any] = field(repr=False)
    step: StepGraph = field(repr=False)
    device: torch.device
    where: str
    peak_bytes: int
    limit: int | None = None
    asked: bool = True
    state: str = "not recorded yet"
    replays: bool = True
    calls: int = 0
    recorded: int = 0
    known: tuple = ()
    graph: Any = None
    results: tuple = field(default=(), repr=False)
    buffers: dict[int, Tensor] = field(default_factory=dict, repr=False)

    _boxed_call = True

    def __post_init__(self) -> None:
        if reason := obstacle(self.step, self.asked) or self._not_little(self.peak_bytes - self._resident_bytes()):
            self._stop(reason)
        self.batch = [i for i, given in enumerate(self.step.inputs) if given.role is Role.BATCH]
        self.read = [bool(node.users) for node in self.step.placeholders]

    def __call__(self, inputs: list) -> Any:
        self.calls += 1
        if not self.replays or self.calls <= WARM or being_measured() or torch.cuda.is_current_stream_capturing():
            return self.run(inputs)
        key = tuple(map(self._key, range(len(inputs)), inputs))
        if key != self.known and not self._record(inputs, key):
            return self.run(inputs)
        given = list(inputs)
        inputs.clear()
        for i, buffer in self.buffers.items():
            buffer.copy_(given[i])
        self.graph.replay()
        return tuple(r.clone() if isinstance(r, Tensor) else given[r.place] if isinstance(r, _Given) else r
                     for r in self.results)

    def _key(self, place: int, value: Any) -> Any:
        """What must not change for a graph to stay true (rule 3)."""
        if not (isinstance(value, Tensor) and self.read[place]) or place in self.batch and value.device.type == "cuda":
            return None  # nobody reads it, or it is copied
        return value.data_ptr() if value.device.type == "cuda" else value.item()

    def _record(self, inputs: list, key: tuple) -> bool:
        """Record the step for inputs of this `key`; nothing has been computed when it cannot be."""
        if self.recorded == RECORDINGS:
            return self._stop(f"{self._changed(key)} changed again after {RECORDINGS} recordings: keep it in place, and "
                              "a learning rate in a tensor on the device")
        self.graph, self.results = None, ()
        for i in self.batch:
            if isinstance(inputs[i], Tensor) and inputs[i].device.type == "cuda":
                self.buffers[i] = torch.empty_like(inputs[i]).copy_(inputs[i])
        held = [self.buffers.get(i, value) for i, value in enumerate(inputs)]
        try:
            rehearse(self.run, held, self.device)
        except Exception as error:  # nothing has run: whatever it was, the step can do without
            return self._stop(f"PyTorch cannot record it: {(str(error) or repr(error)).splitlines()[0]}")
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.device)
        graph, made = recorded(self.run, held, _pool(self.device))
        grown = torch.cuda.memory_reserved(self.device) - before
        results = tuple(_Given.of(each, held) for each in made)
        if reason := self._too_much(results, held, grown):
            return self._stop(reason)
        self.graph, self.results, self.known = graph, results, key
        self.recorded += 1
        self.state = f"recorded {self.recorded} times, the last time in call {self.calls}; " \
                     f"{format_bytes(grown)} more were reserved for it"
        return True

    def _too_much(self, results: tuple, held: list, grown: int) -> str | None:
        """Why the results cannot be copied, or the memory that the graph keeps does not fit."""
        made = [r for r in results if isinstance(r, Tensor)]
        taken = {t.untyped_storage().data_ptr() for t in held if isinstance(t, Tensor)}
        for place in (t.untyped_storage().data_ptr() for t in made if t.numel()):
            if place in taken:
                return "a result shares memory with another or with an input"
            taken.add(place)
        nbytes = sum(t.nbytes for t in made)
        if nbytes > max(RESULTS[0] * self.peak_bytes, RESULTS[1]):
            return (f"its results are {format_bytes(nbytes)}, and would be there twice: end the step with "
                    "zero_grad(), and return no more than losses")
        if reason := self._not_little(grown):
            return reason
        kept = sum(b.nbytes for b in self.buffers.values()) + nbytes
        needed = max(self.peak_bytes, self._resident_bytes() + grown) + kept
        if self.limit is not None and needed > self.limit:
            return f"with the memory that a graph keeps it needs {format_bytes(needed)}, and the budget is " \
                   f"{format_bytes(self.limit)}"
        return None

    def _not_little(self, kept: int) -> str | None:
        """Why a graph that nobody asked for shall not keep so many bytes (rule 5)."""
        if self.asked:
            return None
        free, all_bytes = torch.cuda.mem_get_info(self.device)
        if kept <= min(LITTLE * all_bytes, free):
            return None
        return (f"a graph would keep {format_bytes(kept)} between steps, and {format_bytes(free)} of the device are free: "
                "say cuda_graphs=True if nothing else wants them")

    def _resident_bytes(self) -> int:
        return sum(given.nbytes for given in self.step.inputs)

    def _changed(self, key: tuple) -> str:
        labels = [given.label for given, old, new in zip(self.step.inputs, self.known, key) if old != new]
        return labels[0] if labels else "an input"

    def _stop(self, reason: str) -> bool:
        """Run unrecorded from now on. False."""
        self.replays, self.graph, self.results, self.buffers, self.state = False, None, (), {}, f"off: {reason}"
        log.log(logging.WARNING if self.asked else logging.INFO, "%s: not replayed as a CUDA graph: %s", self.where, reason)
        return False


@dataclass(frozen=True)
class _Given:
    """A result that is the input at `place` itself."""

    place: int

    @classmethod
    def of(cls, value: Any, inputs: list) -> Any:
        """`value`, or what stands for it if it is one of `inputs`."""
        return next((cls(i) for i, each in enumerate(inputs) if isinstance(value, Tensor) and each is value), value)
