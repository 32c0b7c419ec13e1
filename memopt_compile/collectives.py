"""Collectives in a graph: operators that all ranks run together, and waits for their results.

A collective returns at once. Its result may be read behind a ``wait_tensor`` of it, and until then
what it was given has to stay as it is: the sending may not have begun.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .compat.collectives import GATHERS_INTO
from .compat.trace import hinted

OPERATOR = type(torch.ops.aten.add.Tensor)  # the class of every ATen operator overload
COLLECTIVES = "_c10d_functional"  # the namespace of operators that all ranks run together ..
WAIT = torch.ops._c10d_functional.wait_tensor.default  # .. and of waiting for their results
GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
GATHER_INTO = torch.ops._c10d_functional.all_gather_into_tensor_out.default  # a tensor that is there


def is_collective(node: fx.Node) -> bool:
    """Whether all ranks have to run `node` together. Waiting for its result needs no other rank."""
    return (isinstance(node.target, OPERATOR) and node.target.namespace == COLLECTIVES
            and node.target is not WAIT) or node.target is GATHERS_INTO


def is_wait(node: fx.Node) -> bool:
    return node.target is WAIT


def launch_of(wait: fx.Node) -> fx.Node:
    """The collective that `wait` waits for."""
    result = wait.args[0]
    return result.args[0] if result.target is operator.getitem else result


def waits_of(launch: fx.Node) -> list[fx.Node]:
    results = [u for u in launch.users if u.target is operator.getitem] or [launch]
    return [u for result in results for u in result.users if is_wait(u)]


def arrived(value: fx.Node) -> fx.Node:
    """What others may read of a storage: of a collective's result the wait for it."""
    return next((u for u in value.users if is_wait(u)), value)


def operands(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values have to be there while `node` runs: a wait needs its collective's."""
    if is_wait(node) and is_collective(launch_of(node)):
        launch = launch_of(node)  # where that writes is its value
        into = launch.kwargs.get("out", ())
        written = into if isinstance(into, list | tuple) else [into]
        return [*node.all_input_nodes, *(a for a in launch.all_input_nodes if a not in written)]
    return node.all_input_nodes


def readers(node: fx.Node) -> list[fx.Node]:
    """The nodes that have `node` among their `operands`."""
    return [*node.users, *(w for u in node.users if is_collective(u) for w in waits_of(u))]


def whole_bytes(launch: fx.Node) -> int:
    """Bytes of what a collective communicates as a whole: of a gather its results, of others what they
    are given, which may be a part of a larger storage."""
    given = launch.args[0] if isinstance(launch.args[0], list | tuple) else [launch.args[0]]
    values = [n.meta["val"] for n in given]
    ranks = launch.args[1] if "all_gather" in launch.target._schema.name else 1
    return sum(hinted(v.numel()) * v.element_size() for v in values) * ranks


def first_read_too_early(graph: fx.Graph) -> fx.Node | None:
    """A collective whose result something else than a wait reads."""
    for node in graph.nodes:
        for result in (u for u in (node, *node.users) if is_collective(node)):
            if result is node or result.target is operator.getitem:
                if any(not is_wait(u) and u.target is not operator.getitem for u in result.users):
                    return node
    return None


def bucket_fault(graph: fx.Graph, cap_bytes: int | None,
                 phase: Callable[[fx.Node], Any]) -> tuple[fx.Node, str, str] | None:
    """A bucket that is too large or of two phases, what is wrong with it, and what to do."""
    for bucket in graph.nodes:
        if not (is_collective(bucket) and isinstance(bucket.args[0], list | tuple)):
            continue
        if cap_bytes is not None and whole_bytes(bucket) > cap_bytes:
            return bucket, f"{bucket.name} communicates {whole_bytes(bucket)} B at once, above {cap_bytes}", (
                "make two of it")
        if {phase(w) for w in waits_of(bucket)} - {phase(bucket)}:
            return bucket, f"{bucket.name} has parts of forward and of backward", (
                "keep collectives of a phase together")
    return None
