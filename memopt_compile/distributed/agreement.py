"""What all ranks have to have alike, compared before they depend on it.

Ranks that do not make the same collectives one after another wait for each other for ever. So models
are compared when they are sharded, and steps when they are compiled; what differs is an error on
every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..collectives import is_collective
from ..compat import trace
from ..errors import RankError
from . import planned

REFUSED = "refused: "


def sequence(graph: fx.Graph, mesh: Any) -> list[str]:
    """The collectives of a graph in their order: operator, operands, numbers, and which group.

    Groups have other names on other ranks; here they are counted as they come. Replicas send each other
    rows, of which the ranks that share a model may have other numbers: those are left out. Nor does it matter
    to others whether a rank has its result in its arena.
    """
    replicas = mesh.get_group(0).group_name if mesh.ndim == 2 else None
    groups: dict[Any, int] = {}
    lines = []
    for node in filter(is_collective, graph.nodes):
        *given, group = node.args
        values = [_described(value, group == replicas) for value in given]
        target = node.target._schema.name.split("::")[1].removesuffix("_out")
        lines.append(f"{target}({', '.join(values)}) in group {groups.setdefault(group, len(groups))}")
    return lines


def _described(value: Any, rows: bool) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_described(each, rows) for each in value)}]"
    tensor = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(tensor, Tensor):
        return str(value)
    return f"{tensor.dtype}{['rows', *tensor.shape[1:]] if rows and tensor.dim() else [*tensor.shape]}"


def compare(mine: Sequence[str], mesh: Any, what: str, where: str, do: str) -> None:
    """Every rank of `mesh` comes here with its lines of `what`, or with those of a step that it has `refused`.

    Raises:
        RankError: they are not the same on all ranks. All raise it, and name the first that refuses, or the first
            difference.
    """
    short = hashlib.sha256("\n".join(mine).encode()).hexdigest()
    if len(set(exchange(short, mesh))) == 1:
        return
    found = exchange(list(mine), mesh)
    for rank, lines in zip(numbers(mesh), found):
        if lines and lines[0].startswith(REFUSED):
            raise RankError(f"rank {rank} refuses its step: {lines[0].removeprefix(REFUSED)}", where=where,
                            do="see that rank's error")
    first_rank = numbers(mesh)[0]
    for rank, lines in zip(numbers(mesh), found):
        if lines != found[0]:
            at = next((i for i, (a, b) in enumerate(zip(lines, found[0])) if a != b),
                      min(len(lines), len(found[0])))
            first, here = (lines_of[at] if at < len(lines_of) else "nothing more"
                           for lines_of in (found[0], lines))
            raise RankError(f"{what} of rank {rank} are not those of rank {first_rank}: number {at + 1} is "
                            f"{here} there, and {first} on rank {first_rank}", where=where, do=do)


def refused(why: str) -> list[str]:
    """The lines of a rank that has none to compare."""
    return [f"{REFUSED}{why}"]


def numbers(mesh: Any) -> list[int]:
    """The ranks of a mesh, in its order."""
    return mesh.mesh.flatten().tolist()


def exchange(value: Any, mesh: Any) -> list[Any]:
    """What all ranks of the mesh give, in its order: along its last dimension first."""
    found = [value]
    for dim in reversed(range(mesh.ndim)):
        gathered: list[Any] = [found] * mesh.size(dim)
        if not planned.active():
            with trace.dispatched_by_cpp():
                torch.distributed.all_gather_object(gathered, found, group=mesh.get_group(dim))
        found = [each for part in gathered for each in part]
    return found
