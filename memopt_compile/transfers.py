"""Operators that take activations to host memory and back, beside what the device computes.

    host = to_host(x); ..; host = sent(host, x)     x has to stay as it is until it was sent
    y = from_host(host, device); ..; y = arrived(y)     y is not to be read before it has arrived

`to_host` and `from_host` begin a copy and return; `sent` and `arrived` have the device's later work
wait for it, the host never waits. On CUDA copies run on streams of their own, one each way, as the two
directions of the link do, and the host's side is pinned. On the CPU, whose memory is the host's, they
are plain copies: there the order and the numbers of such a step can be tried.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakIdKeyDictionary

from .step_graph import Phase, StepGraph

HOST = "host"  # the form of an activation that waits there
_copied: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by what is being copied to, the event of its end


@torch.library.custom_op("memopt::to_host", mutates_args=())
def to_host(value: Tensor) -> Tensor:
    """A tensor of the same layout in (pinned) host memory, to which `value` is being copied."""
    host = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype,
                               pin_memory=value.is_cuda)
    return _copy(host, value, value.device, outward=True)


@torch.library.custom_op("memopt::from_host", mutates_args=())
def from_host(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same layout on `device`, to which `host` is being copied."""
    value = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
    return _copy(value, host, device, outward=False)


@to_host.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")


@from_host.register_fake
def _(host: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)


def _copy(to: Tensor, value: Tensor, device: torch.device, outward: bool) -> Tensor:
    if device.type != "cuda":
        return to.copy_(value)
    beside = _stream(device, outward)
    # What made `value`, and what last used the memory of `to`, comes first.
    beside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(beside):
        to.copy_(value, non_blocking=True)
    _copied[to] = beside.record_event()
    return to


@functools.cache
def _stream(device: torch.device, outward: bool) -> Any:
    return torch.cuda.Stream(device)


def _wait(copied: Tensor, device: torch.device, outward: bool) -> Tensor:
    if device.type == "cuda":
        now = torch.cuda.current_stream(device)
        event = _copied.pop(copied, None)
        if event is None:  # a copy that nobody knows the end of is over when all on its way are
            now.wait_stream(_stream(device, outward))
        else:
            now.wait_event(event)
    return copied


# Their results are their first arguments, which `custom_op` does not allow.
_library = torch.library.Library("memopt", "FRAGMENT")
_library.define("sent(Tensor(a) host, Tensor value) -> Tensor(a)")
_library.define("arrived(Tensor(a) value) -> Tensor(a)")
_library.impl("sent", lambda host, value: _wait(host, value.device, True), "CompositeExplicitAutograd")
_library.impl("arrived", lambda value: _wait(value, value.device, False), "CompositeExplicitAutograd")

# Host and device meet in it: without this no one would know where its result is.
torch.library.register_fake("memopt::sent", lambda host, value: host, lib=_library)

TO_HOST, FROM_HOST = torch.ops.memopt.to_host.default, torch.ops.memopt.from_host.default
SENT, ARRIVED = torch.ops.memopt.sent.default, torch.ops.memopt.arrived.default
BEGINNINGS = (TO_HOST, FROM_HOST)


def sent_to_host(step: StepGraph, value: fx.Node, behind: fx.Node) -> fx.Node:
    """The host's copy of `value`, made right behind a node."""
    with step.graph.inserting_after(behind):
        host = step.call(value, TO_HOST, value)
    with step.graph.inserting_after(host):
        return step.call(value, SENT, host, value)


def fetched(step: StepGraph, value: fx.Node, sent: fx.Node) -> fx.Node:
    """`value` again, made where the graph inserts now, for backward."""
    begun = step.call(value, FROM_HOST, sent, value.meta["val"].device)
    arrived = step.call(value, ARRIVED, begun)
    step.phases[begun] = step.phases[arrived] = Phase.BACKWARD
    return arrived


def is_transfer(node: fx.Node) -> bool:
    """Whether `node` begins a copy between host and device, or waits for the end of one."""
    return node.target in (TO_HOST, SENT, FROM_HOST, ARRIVED)
