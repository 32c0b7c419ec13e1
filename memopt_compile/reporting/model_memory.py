"""Memory of a step by what it is for, in bits for each parameter, and which way its gradients took.

Model memory, in LPMM's sense, is what is in proportion to the parameters: parameters, gradients, optimizer
state and buffers. The rest is in proportion to the batch (activations) or there for a few operators
only: parameters decoded for one of them, what an update computes, workspace.

A gradient is the finished gradient of a backward, the sum of such, and a sum in few bits, as codes or
decoded. A storage is counted as what was first written into it.
"""

from __future__ import annotations

import functools
import operator
import re
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ..collectives import is_collective, is_wait
from ..compat.trace import hinted
from ..liveness import Lifetimes, Timeline, lifetimes, live_bytes
from ..optim.low_bit import GRADIENT
from ..optim.one_operator import ADD, UPDATES
from ..quantization.operators import DEQUANTIZE, QUANTIZE
from ..step_graph import (
    Input,
    Phase,
    Role,
    StepGraph,
    aliased_args,
    mutated_args,
    op_name,
    source_line,
    storage_roots,
)

KINDS = {
    Role.PARAMETER: "parameters",
    Role.GRADIENT: "gradients",
    Role.STATE: "optimizer state",
    Role.BUFFER: "buffers",
    Role.BATCH: "batch",
    Role.NUMBER: "numbers",
    Role.ARENA: "arena",
}
MODEL = ("parameters", "gradients", "optimizer state", "buffers")
GATHERED = "gathered parameters"
DECODED, ACTIVATIONS, TEMPORARIES = "decoded parameters", "activations", "temporaries"
BEYOND = (GATHERED, DECODED, ACTIVATIONS, TEMPORARIES)
SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
OF_GRADIENTS = re.compile(rf"\['{GRADIENT}(_scale)?'\]$")  # states that are sums of gradients

EIGHT, FULL, FOLDED, LEFT, FREED = (
    "added up in 8 bits", "added up in full precision", "folded into the optimizer state",
    "left in .grad", "used by their updates")


@dataclass(frozen=True)
class ModelMemory:
    """Bytes by kind: of what the step finds, and so leaves, in `between`; of all that is alive `at_peak` of
    the schedule; and of each kind by itself when there is most of it, in `most`.

    `parameters` are elements. `gradients` counts the gradients by the way they took, and
    `gradient_bytes` are those of one backward in full precision: with ZeRO this rank's rows, once they are
    scattered. `at_once` is the most of them that are alive at once, and `largest` the largest one; `waited_for`
    is the user's line whose number needs all of them before the first update, such as a clip by their norm.
    """

    parameters: int
    between: dict[str, int]
    at_peak: dict[str, int]
    most: dict[str, int]
    gradients: dict[str, int]
    gradient_bytes: int
    at_once: int = 0
    largest: int = 0
    waited_for: str | None = None

    def bits(self, nbytes: int) -> float:
        """Bits for each parameter."""
        return 8 * nbytes / self.parameters if self.parameters else 0.0

    def model_bytes(self, of: dict[str, int]) -> int:
        """Those of `of` (`between`, say) that are in proportion to the parameters."""
        return sum(of[kind] for kind in MODEL)

    @property
    def way(self) -> str:
        """Which way the gradients took, in words."""
        if list(self.gradients) == [FREED]:
            freed = self.at_once < self.gradient_bytes
            return "freed one by one behind their updates" if freed else "kept until the last is there"
        if len(self.gradients) < 2:
            return next(iter(self.gradients), "none")
        return ", ".join(f"{count} {way}" for way, count in self.gradients.items())


def kind_of(given: Input) -> str:
    """The kind of an input."""
    if given.role is Role.STATE and OF_GRADIENTS.search(given.label):
        return KINDS[Role.GRADIENT]
    return KINDS[given.role]


def kinds_of_values(step: StepGraph, life: Lifetimes) -> dict[fx.Node, str]:
    """The kind of each tensor that the step allocates."""
    roots, forward = storage_roots(step.graph), Phase.FORWARD
    gradients = {root for node in _gradients(step) for root in roots[node] if step.phase(root) is not forward}
    parameters = {node for node, role in step.roles().items() if role is Role.PARAMETER}
    return {node: _kind(step, node, gradients, parameters) for node in life.size}


def _kind(step: StepGraph, node: fx.Node, gradients: Container[fx.Node], parameters: Container[fx.Node]) -> str:
    if node in gradients:
        return KINDS[Role.GRADIENT]
    launch = node.args[0] if node.target is operator.getitem else node
    if is_collective(launch) and op_name(launch).startswith("all_gather"):
        return GATHERED
    if node.target is DEQUANTIZE and all(a in parameters or is_wait(a) for a in node.all_input_nodes):
        return DECODED
    return ACTIVATIONS if step.phase(node) is Phase.FORWARD else TEMPORARIES


def input_bytes(step: StepGraph) -> dict[str, int]:
    """Bytes of the step's inputs by kind."""
    sizes = dict.fromkeys(KINDS.values(), 0)
    for given in step.inputs:
        sizes[kind_of(given)] += given.nbytes
    return sizes


def model_memory(step: StepGraph, timeline: Timeline) -> ModelMemory:
    """Of a whole step with its `timeline`."""
    gradients, life, roots = _gradients(step), lifetimes(step.graph), storage_roots(step.graph)
    order = [point.node for point in timeline.points]
    owners: dict[str, list[fx.Node]] = {kind: [] for kind in ("gradients", *BEYOND)}
    for node, kind in kinds_of_values(step, life).items():
        owners[kind].append(node)
    curves = {kind: live_bytes(order, _only(life, owners[kind])) for kind in ("gradients", *BEYOND[:-1])}
    live = [point.live_bytes for point in timeline.points]
    curves[TEMPORARIES] = [all_ - sum(some) for all_, *some in zip(live, *curves.values())]
    at = live.index(max(live)) if live else 0
    between = input_bytes(step) | dict.fromkeys(BEYOND, 0)
    of_one, finished = Counter[int](), {node: [r for r in roots[node] if r in life.size] for node in step.gradients}
    for node, backward in step.gradients.items():
        of_one[backward] += sum(life.size[root] for root in finished[node])
    at_once = max(live_bytes(order, _only(life, {r for found in finished.values() for r in found})), default=0)
    gradient_bytes = max(of_one.values(), default=0)
    return ModelMemory(
        _elements(step), between,
        {kind: size + (curves[kind][at] if kind in curves and live else 0) for kind, size in between.items()},
        {kind: size + max(curves.get(kind, [0]), default=0) for kind, size in between.items()},
        dict(Counter(_ways(step, gradients, life.kept, roots)).most_common()), gradient_bytes, at_once,
        max((sum(life.size[root] for root in found) for found in finished.values()), default=0),
        _waited_for(step) if at_once >= gradient_bytes else None)


def _elements(step: StepGraph) -> int:
    """Elements of all parameters. One in low precision is several inputs, the first with a byte for each."""
    first = {given.label: node for given, node in reversed(list(zip(step.inputs, step.placeholders)))
             if given.role is Role.PARAMETER and isinstance(node.meta["val"], Tensor)}
    return sum(hinted(node.meta["val"].numel()) for node in first.values())


def _only(life: Lifetimes, owners: Iterable[fx.Node]) -> Lifetimes:
    """Of these owners alone. An item of a tuple is born with the tuple."""
    size, born = {n: life.size[n] for n in owners}, Counter[fx.Node]()
    for node, nbytes in size.items():
        born[node.args[0] if node.target is operator.getitem else node] += nbytes
    return replace(life, size=size, born=born)


def _gradients(step: StepGraph) -> set[fx.Node]:
    """The nodes, inputs included, whose values are gradients, whole or of this rank's rows."""
    found = {node for node, given in zip(step.placeholders, step.inputs) if kind_of(given) == "gradients"}
    found |= step.gradients.keys()
    for node in step.computing():
        if node.target is QUANTIZE:
            read: Sequence[Any] = node.args[:1]
        elif _adds(node):
            read = node.args[1]
        elif is_collective(node) and op_name(node).startswith("reduce_scatter"):
            found |= {node, *node.all_input_nodes}
            continue
        elif (node.target in (*SUMS, DEQUANTIZE, operator.getitem) or is_collective(node)
              or aliased_args(node)):
            read = node.all_input_nodes
        else:
            continue
        if read and all(a in found for a in read):
            found.add(node)
    return found


def _adds(node: fx.Node) -> bool:
    """Whether a gradient is added to a sum in few bits by one operator."""
    return node.target in UPDATES and node.args[3].endswith(f" {ADD}")


def _ways(step: StepGraph, gradients: set[fx.Node], kept: frozenset[fx.Node],
          roots: dict[fx.Node, frozenset[fx.Node]]) -> list[str]:
    """The way of each gradient."""
    reached = {node: _computed_of(step, node) for node in step.gradients}
    taken: dict[fx.Node, set[int]] = {}  # by input: the backwards whose gradients have gone into it
    for node, nodes in reached.items():
        for root in _written(nodes, roots):
            taken.setdefault(root, set()).add(step.gradients[node])
    ways = []
    for node, nodes in reached.items():
        also = [n for n in nodes if n in gradients]
        if any(n.target in SUMS and len(n.all_input_nodes) > 1 and not _of_codes(n, roots) for n in also):
            ways.append(FULL)
        elif any(n.target is QUANTIZE or _adds(n) for n in also):
            ways.append(EIGHT)
        elif any(len(taken[root]) > 1 for root in _written(nodes, roots)):
            ways.append(FOLDED)
        else:
            ways.append(LEFT if roots[node] & kept else FREED)
    return ways


def _written(nodes: Iterable[fx.Node], roots: dict[fx.Node, frozenset[fx.Node]]) -> set[fx.Node]:
    """The inputs that they write to."""
    return {r for n in nodes for a in mutated_args(n) for r in roots[a] if r.op == "placeholder"}


def _of_codes(total: fx.Node, roots: dict[fx.Node, frozenset[fx.Node]]) -> bool:
    return any(r.target is DEQUANTIZE for a in total.all_input_nodes for r in roots[a])


def _waited_for(step: StepGraph) -> str | None:
    """The user's line that makes a single number of all gradients, by which tensors are then changed."""
    bits = {gradient: 1 << i for i, gradient in enumerate(step.gradients)}
    every, of = 2 ** len(bits) - 1, dict[fx.Node, int]()
    for node in step.computing():
        of[node] = functools.reduce(operator.or_, (of.get(a, 0) for a in node.all_input_nodes), bits.get(node, 0))
        if of[node] == every and len(bits) > 1 and _dim(node) == 0 and any(_dim(user) for user in node.users):
            return source_line(node)
    return None


def _dim(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, Tensor) else 0


def _computed_of(step: StepGraph, gradient: fx.Node) -> set[fx.Node]:
    """What is computed of a gradient by the update, but for single numbers and what is of those."""
    found: set[fx.Node] = set()
    stack = list(gradient.users)
    while stack:
        node = stack.pop()
        value = node.meta.get("val")
        if (node in found or node in step.gradients or node.op == "output"
                or step.phase(node) is Phase.FORWARD or isinstance(value, Tensor) and value.dim() == 0):
            continue
        found.add(node)
        stack.extend(node.users)
    return found
