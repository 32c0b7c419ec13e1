"""The exact peak of one call: how many bytes, when, and who holds them.

The profiler reports every block that PyTorch's allocator hands out or takes back while the call
runs. Their running sum on top of what was alive before (the *resident* bytes) is the memory over
time. Eager, aot_eager and Inductor all allocate there, so they are compared on equal terms. One
gap needs closing: the CPU allocator does not know the size of a block older than the recording,
and its release goes unreported. Resident storages are therefore watched, and the end of each
leaves a mark in the same recording, in its true place among the events.

Not seen: blocks allocated or freed on threads that the call starts, memory that does not come
from PyTorch (NumPy, workspaces of libraries), and a resident storage that is resized. The first
call of a compiled function compiles inside the window: call it once before measuring.
"""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.autograd.profiler import profile

from .compat.trace import profiler_active

# Who a resident storage belongs to. When several claim it, the first of these has it.
ROLES = ("parameters", "gradients", "optimizer state", "buffers", "inputs", "others")

# The size of the block that marks the end of a resident storage. Address and size together tell
# marks from the call's own blocks; an odd prime is a size that tensors hardly ever have.
_MARK_BYTES = 1009


@dataclass(frozen=True, eq=False)
class Measurement:
    """What one call needed, in bytes. Equal runs give equal bytes; seconds are for drawing only.

    `timeline` holds (seconds since the first event, live bytes, resident ones included) after each
    change, and starts with the resident bytes. `by_category` sums to `peak_bytes`: what was alive
    before by its role (see `ROLES`), what the call allocated as "transient". `categories` has the same for
    every entry of the timeline.
    """

    peak_bytes: int
    resident_bytes: int
    transient_peak_bytes: int  # peak over resident: what the call added at its worst moment
    end_bytes: int  # net change from start to end; the result is part of it
    allocations: int
    by_category: Mapping[str, int]
    device: str
    timeline: tuple[tuple[float, int], ...] = field(repr=False)
    held: tuple[Mapping[str, int], ...] = field(repr=False)  # what is left of each role, as the timeline goes
    result: Any = field(repr=False)

    @property
    def categories(self) -> list[tuple[float, dict[str, int]]]:
        """(seconds, bytes by category) for every entry of the timeline."""
        return [(seconds, {**held, "transient": live - sum(held.values())})
                for (seconds, live), held in zip(self.timeline, self.held)]


def measure(
    fn: Callable[..., Any], /, *args: Any, resident: Any = None, **kwargs: Any
) -> Measurement:
    """Run `fn(*args, **kwargs)` once and return its exact memory use.

    `resident` names what is alive before the call and belongs to the account: a module, an
    optimizer, tensors, or any nest of them, each storage counted once. Tensors among the
    arguments always count, as "inputs". With None, every live tensor of the device that the
    garbage collector can find counts, the gradients of those included; tensors held only inside
    C++ (saved for a backward still to come) cannot be found. The device is CUDA if any of these
    tensors is there, else the CPU.

    Raises TypeError for something in `resident` that holds no tensors, RuntimeError while a profiler records
    (a second one would end it), and whatever `fn` raises.
    """
    if args or kwargs or not (isinstance(resident, (tuple, list)) and not resident):
        gc.collect()  # Garbage must not count as resident, nor vanish in the middle of the call.
    deaths: _Deaths = defaultdict(deque)
    watched = _survey(resident, args, kwargs, deaths)
    resident = None  # Else a tensor named here would outlive its own end.
    deaths.clear()
    blocks = [block for block, watcher in watched if watcher() is not None]
    device = "cuda" if any(block.device == "cuda" for block in blocks) else "cpu"
    roles: dict[str, int] = dict.fromkeys(ROLES, 0)
    for block in blocks:
        roles[block.role] += block.nbytes if block.device == device else 0
    resident_bytes = live = peak = sum(roles.values())
    at_peak = now = dict(roles)
    result, events = _record(partial(fn, *args, **kwargs), device)
    watched.clear()
    timeline, held = [(0.0, live)], [now]
    window: dict[int, int] = {}  # The call's own live blocks: address to bytes.
    marks: set[int] = set()
    allocations = 0
    for start_ns, nbytes, address in events:
        if nbytes == _MARK_BYTES and deaths.get(address):
            marks.add(address)
            block = deaths[address].popleft()
            if block.device == device:
                now = {**now, block.role: now[block.role] - block.nbytes}
                live -= block.nbytes if device == "cpu" else 0
        elif address in marks:
            marks.remove(address)
        elif device == "cuda":  # Its allocator knows every size; of the CPU only marks are wanted.
            allocations += nbytes > 0 and not address
            live += 0 if address else nbytes
        elif nbytes > 0:
            allocations += 1
            live += nbytes - window.pop(address, 0)  # Still there if another thread freed it.
            window[address] = nbytes
        elif address in window:
            live -= window.pop(address)
        # Else its size is known from an earlier recording: a resident storage, already counted by
        # its mark, or one that the caller left out of the account.
        if live != timeline[-1][1]:  # A mark's own release, say, is no change.
            timeline.append(((start_ns - events[0][0]) * 1e-9, live))
            held.append(now)
        if live > peak:
            peak, at_peak = live, now
    found = {role: size for role, size in at_peak.items() if size}
    return Measurement(
        peak_bytes=peak,
        resident_bytes=resident_bytes,
        transient_peak_bytes=peak - resident_bytes,
        end_bytes=live - resident_bytes,
        allocations=allocations,
        by_category={**found, "transient": peak - sum(found.values())},
        device=device,
        timeline=tuple(timeline),
        held=tuple(held),
        result=result,
    )


def tensor_bytes(nest: Any) -> int:
    """Bytes of all tensors in `nest` (as `measure`'s `resident`), each distinct storage once.

    Gradients of the tensors count too. Views cost nothing of their own, but keep the whole of
    their storage; a wrapper subclass (a quantized parameter, a DTensor) costs what is inside it.
    Raises TypeError for something that holds no tensors.
    """
    found = (s for tensor, _ in _walk(nest, "others", strict=True) for s in _storages(tensor))
    distinct = {storage._cdata: storage for storage in found}
    return sum(storage.nbytes() for storage in distinct.values())


class _Block(NamedTuple):  # A storage alive before the call, described without keeping it so.
    nbytes: int
    role: str
    device: str


_Deaths = defaultdict[int, deque[_Block]]  # Address of a mark to the blocks whose end it marked.


def _survey(
    resident: Any, args: Any, kwargs: Any, deaths: _Deaths
) -> list[tuple[_Block, weakref.ref[torch.UntypedStorage]]]:
    """Find the resident storages, give each a role and watch for its end."""
    claims = list(_walk((args, kwargs), "inputs", strict=False))
    if resident is None:
        kinds = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
        # By type(), since isinstance() would wake lazy modules and proxies among the objects.
        for item in [item for item in gc.get_objects() if issubclass(type(item), kinds)]:
            with contextlib.suppress(RuntimeError):  # a view that autograd no longer lets be asked
                claims += _walk(item, "others", strict=True)
    else:
        claims += _walk(resident, "others", strict=True)
    claims.sort(key=lambda claim: ROLES.index(claim[1]))
    owner: dict[int, tuple[torch.UntypedStorage, str]] = {}
    for tensor, role in claims:
        try:
            for storage in _storages(tensor):
                if storage.device.type != "meta" and storage.data_ptr():
                    owner.setdefault(storage._cdata, (storage, role))
        except (NotImplementedError, RuntimeError, ValueError):
            if resident is not None:
                raise
            # A tracer's fake or wrapper, or a lazy parameter: found alive, but without memory.
    watched = []
    for storage, role in owner.values():
        block = _Block(storage.nbytes(), role, storage.device.type)
        watched.append((block, weakref.ref(storage, partial(_mark_death, block, deaths))))
    return watched


def _mark_death(block: _Block, deaths: _Deaths, _: object) -> None:
    # A bare storage, because an op here could end up in a graph that is being traced.
    mark = torch.UntypedStorage(_MARK_BYTES, device="cpu")
    deaths[mark.data_ptr()].append(block)


def _walk(item: Any, role: str, strict: bool) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield every tensor in a nest with its role; `strict` refuses what is no nest of tensors."""
    if isinstance(item, torch.Tensor):
        yield item, "parameters" if isinstance(item, torch.nn.Parameter) else role
        if item.is_leaf and item.grad is not None:
            yield item.grad, "gradients"
    elif isinstance(item, torch.nn.Module):
        yield from _walk(list(item.parameters()), "parameters", strict)
        yield from _walk(list(item.buffers()), "buffers", strict)
    elif isinstance(item, torch.optim.Optimizer):
        for group in item.param_groups:
            yield from _walk(group["params"], "parameters", strict=False)
            yield from _walk(group, "optimizer state", strict=False)
        yield from _walk(item.state, "optimizer state", strict=False)
    elif isinstance(item, Mapping):
        yield from _walk(list(item.values()), role, strict)
    elif is_dataclass(item) and not isinstance(item, type):
        yield from _walk([getattr(item, each.name) for each in fields(item)], role, strict)
    elif item is None or isinstance(item, (str, bytes, int, float, complex)):
        return
    elif isinstance(item, Iterable) and (strict or isinstance(item, (list, tuple, set))):
        # Only a nest that the caller names may be consumed; an argument's iterator belongs to fn.
        for value in item:
            yield from _walk(value, role, strict)
    elif strict:
        kind = type(item).__name__
        raise TypeError(f"{kind} holds no tensors: name modules, optimizers, tensors or nests")


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages that hold a tensor's data: its own, or those of the tensors it is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)  # Wrapper subclasses have it.
    if flatten is not None:
        for name in flatten()[0]:
            if isinstance(inner := getattr(tensor, name), torch.Tensor):  # a DTensor's mesh is none
                yield from _storages(inner)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices().untyped_storage(), tensor._values().untyped_storage())
    else:
        yield tensor.untyped_storage()


_now = {"measured": False}


def being_measured() -> bool:
    """Whether this is within a call of `measure`."""
    return _now["measured"]


def _record(call: Callable[[], Any], device: str) -> tuple[Any, list[tuple[int, int, int]]]:
    """Run `call`; list (start in ns, bytes, address) of a device's events, releases negative, and of marks.

    Addresses are those of the CPU's blocks: releases on CUDA outside any operator are in the flat
    list alone.
    """
    if profiler_active():
        raise RuntimeError("memory is measured with torch's profiler, and one is recording already: measure outside of it")
    # The recorder prints two lines each time, unless this is set when a process first records.
    level = {"KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "99")}
    with (mock.patch.dict(os.environ, level), mock.patch.dict(_now, measured=True),
          profile(use_kineto=True, profile_memory=True) as recording):  # `torch.profiler`'s of 2.11 warns
        result = call()
    kineto: Any = recording.kineto_results
    # The flat list keeps the order of recording, which a stable sort preserves where two events
    # share a start; only the tree knows the addresses.
    addresses: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    pending = deque(kineto.experimental_event_tree())
    while pending:
        node = pending.popleft()
        pending.extend(node.children)
        if node.name == "[memory]" and node.extra_fields.device.type == "cpu":
            block = node.extra_fields
            addresses[node.start_time_ns, block.alloc_size].append(block.ptr)
    flat = (event for event in kineto.events() if event.name() == "[memory]")
    mine = [event for event in flat if event.device_type().name == device.upper()
            or event.device_type().name == "CPU" and abs(event.nbytes()) == _MARK_BYTES]
    order = sorted(((e.start_ns(), e.nbytes(), e.device_type().name) for e in mine), key=lambda event: event[0])
    return result, [(start, size, addresses[start, size].popleft() if where == "CPU" else 0)
                    for start, size, where in order]
