"""Live bytes of a step at every point of its schedule.

The model, shared by planning, scheduling and reports:

- a storage is owned by one node; views and in-place results live in their owner's storage;
- inputs are resident throughout: the caller holds them;
- a storage is born when its owner runs and dies after the last node that touches any alias;
- outputs live to the end;
- what was sent to the host takes nothing of the device;
- tenants of the arena take nothing beside it: it is an input;
- while a node runs it may hold workspace that it frees before it returns (`costs.workspace`).

Sizes are bytes of the whole storage behind a value, not of the view of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from .arena import WINDOW
from .compat.trace import hinted
from .step_graph import Phase, StepGraph, nbytes, operands, storage_roots
from .transfers import TO_HOST

Workspace = Callable[[fx.Node], int]


def no_workspace(node: fx.Node) -> int:
    return 0


@dataclass(frozen=True)
class Point:
    """Live bytes while one node runs: transient, that is beyond the inputs."""

    node: fx.Node
    phase: Phase
    live_bytes: int


@dataclass(frozen=True)
class Timeline:
    """Predicted memory of one run of a step."""

    resident_bytes: int
    points: tuple[Point, ...]

    @property
    def transient_peak_bytes(self) -> int:
        return max((p.live_bytes for p in self.points), default=0)

    @property
    def peak_bytes(self) -> int:
        return self.resident_bytes + self.transient_peak_bytes

    @property
    def peak(self) -> Point | None:
        return max(self.points, key=lambda p: p.live_bytes, default=None)


@dataclass(frozen=True)
class Lifetimes:
    """Who owns what: `size` by owner, the owners that each node touches, those that live to
    the end, and the bytes `born` when a node runs (an item of a tuple is born with the tuple)."""

    size: dict[fx.Node, int]
    touched: dict[fx.Node, frozenset[fx.Node]]
    kept: frozenset[fx.Node]
    born: dict[fx.Node, int]


def lifetimes(graph: fx.Graph, number: Callable[[Any], Any] = hinted,
              roots: Mapping[fx.Node, frozenset[fx.Node]] | None = None) -> Lifetimes:
    """Owners and sizes of every storage that the graph itself allocates (`number`: see `nbytes`). `roots` are its `storage_roots`,
    where these are known.

    An item of a tuple owns its storage, from the tuple on; what nobody takes dies at once.
    """
    roots = roots or storage_roots(graph)
    inputs = {n for n in graph.nodes if n.op in ("placeholder", "get_attr") or n.target is WINDOW}
    size: dict[fx.Node, int] = {}
    born: dict[fx.Node, int] = {}
    touched: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        touched[node] = frozenset() if node in inputs else frozenset(
            r for a in (node, *operands(node)) for r in roots[a]
            if r not in inputs and r.op != "output")
        if node in inputs or node.op == "output" or roots[node] != {node}:
            continue
        size[node] = born[node] = 0 if node.target is TO_HOST else nbytes(node.meta.get("val"), number)
        if node.target is operator.getitem:
            born[node] = 0
            size[node.args[0]] -= size[node]
            touched[node] = frozenset([node])
    kept = frozenset(r for a in graph.output_node().all_input_nodes for r in roots[a])
    return Lifetimes(size, touched, kept, born)


def live_bytes(order: Iterable[fx.Node], life: Lifetimes,
               workspace: Workspace = no_workspace) -> list[int]:
    """Transient bytes while each node of `order` runs."""
    order = list(order)
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(order):
        for root in life.touched[node]:
            last[root] = i
    freed: list[Any] = [0] * len(order)
    for root, i in last.items():
        if root not in life.kept:
            freed[i] += life.size.get(root, 0)
    live, points = 0, []
    for node, dead in zip(order, freed):
        live += life.born.get(node, 0)
        points.append(live + workspace(node))
        live -= dead
    return points


def resident_bytes(step: StepGraph) -> int:
    """Bytes of the step's inputs: parameters, buffers, optimizer state, gradients, batch."""
    return sum(i.nbytes for i in step.inputs)


def seen_by(workspace: Workspace, step: StepGraph) -> tuple[Lifetimes, Mapping[fx.Node, int]]:
    """The lifetimes of `step` as what lowers it has them, and the bytes of operands that an operator writes over."""
    fused = getattr(workspace, "fused", None)  # (`fusing`)
    return fused(step) if fused else (lifetimes(step.graph), {})


def timeline(step: StepGraph, workspace: Workspace = no_workspace) -> Timeline:
    """Predicted live bytes of `step` in its present order."""
    order = list(step.computing())
    life, over = seen_by(workspace, step)
    points = live_bytes(order, life, lambda node: workspace(node) - over.get(node, 0))
    return Timeline(resident_bytes(step), tuple(
        Point(node, step.phase(node), live) for node, live in zip(order, points)))
