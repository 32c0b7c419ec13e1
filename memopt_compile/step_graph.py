"""StepGraph: one whole training step as a graph that passes can read and rewrite.

It owns a functional ATen ``GraphModule`` and says of every input what it is for (`Role`) and
of every node when in the step it belongs (`Phase`). Gradients stay named after the markers
that capture left are gone. Nothing about a decision is kept in ``node.meta``.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from .aliases import (
    UNDECLARED_VIEWS,
    aliased_args,
    first_stale_read,
    mutated_args,
    storage_roots,
    viewed,
)
from .arena import fault
from .collectives import (
    COLLECTIVES,
    OPERATOR,
    WAIT,
    bucket_fault,
    first_read_too_early,
    is_collective,
    operands,
)
from .compat.sizes import polynomial
from .compat.trace import GraphOnly, hinted
from .errors import VerifyError
from .host_part import HostPart
from .memory_plan import MemoryPlan

__all__ = [  # of other modules, for others
    "COLLECTIVES", "OPERATOR", "WAIT", "is_collective", "operands",
    "UNDECLARED_VIEWS", "aliased_args", "first_stale_read", "mutated_args", "storage_roots", "viewed",
]

# What a node that a pass makes has of the one that it stands for: `checkpoint` sets the last two.
_INHERITED = ("stack_trace", "nn_module_stack", "recompute", "ac_graph_id")
_OURS = os.path.dirname(__file__) + os.sep
OF_TORCH = ("aten", "prims", "inductor", "mkldnn", "memopt")  # namespaces of operators that compute and say how


class Role(enum.Enum):
    """What a graph input is for; the letter names it in `StepGraph.text`."""

    PARAMETER = "p"
    STATE = "s"
    GRADIENT = "g"
    BUFFER = "b"
    BATCH = "x"
    NUMBER = "n"
    ARENA = "a"


class Phase(enum.Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True)
class Input:
    """One graph input: `label` is the user's expression for it, `nbytes` its storage, if no input before shows that."""

    name: str
    role: Role
    label: str
    nbytes: int
    trained: bool = False


@dataclass(frozen=True)
class Window:
    """Of the sharded parameter that is the input `full`, the input `rows` has those of this rank, from
    row `start`: the same bytes. `each` is what a rank has (the last ones fewer), `group` its ranks.
    """

    rows: str
    full: str
    start: int
    each: int
    ranks: int
    group: str


@dataclass
class StepGraph:
    """A captured step.

    ``inputs`` follow the order of the graph's placeholders; ``phases`` covers every node that computes;
    ``gradients`` are the nodes that are the whole gradient of a leaf from one backward, numbered from 1; ``plan``
    is what `planner` has decided, and ``unplanned`` what it found none for; ``windows`` are the parameters that
    ZeRO keeps whole beside this rank's part of them, and ``bucket_bytes`` is what small ones that travel together
    may come to; ``parallel`` is the group of ranks that may keep an activation in parts; ``ahead`` is what
    the host computes before.
    """

    module: fx.GraphModule
    inputs: tuple[Input, ...]
    phases: dict[fx.Node, Phase] = field(default_factory=dict)
    gradients: dict[fx.Node, int] = field(default_factory=dict)
    kind: str = "step"
    plan: MemoryPlan | None = None
    unplanned: tuple = ()
    windows: tuple[Window, ...] = ()
    bucket_bytes: int | None = None
    parallel: Any = None
    ahead: HostPart | None = None

    def copy(self) -> StepGraph:
        """The same step with a graph of its own, whose nodes have the same names."""
        graph, twin = fx.Graph(), {}
        graph.output(graph.graph_copy(self.graph, twin))
        graph.output_node().meta.update(self.graph.output_node().meta)
        return replace(self, module=GraphOnly(self.module, graph), unplanned=(),
                       phases={twin[n]: phase for n, phase in self.phases.items()},
                       gradients={twin[n]: number for n, number in self.gradients.items()})

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def placeholders(self) -> list[fx.Node]:
        return self.graph.find_nodes(op="placeholder")

    def computing(self) -> Iterator[fx.Node]:
        """Nodes that run something, in schedule order."""
        return (n for n in self.graph.nodes if n.op not in ("placeholder", "output"))

    def roles(self) -> dict[fx.Node, Role]:
        return {node: i.role for node, i in zip(self.placeholders, self.inputs)}

    def phase(self, node: fx.Node) -> Phase:
        return self.phases.get(node, Phase.UPDATE)

    def op_counts(self) -> dict[str, int]:
        """How many nodes of each operator the graph holds."""
        counts: dict[str, int] = {}
        for node in self.computing():
            counts[op_name(node)] = counts.get(op_name(node), 0) + 1
        return counts

    def reorder(self, order: list[fx.Node]) -> None:
        """Put the computing nodes into `order` (a permutation of them)."""
        anchor = None
        for node in self.graph.nodes:
            if node.op == "placeholder":
                anchor = node
        for node in order:
            if anchor is None:
                first = next(iter(self.graph.nodes))
                if first is not node:
                    first.prepend(node)
            elif anchor.next is not node:
                anchor.append(node)
            anchor = node

    def replace(self, node: fx.Node, by: fx.Node) -> None:
        """Let every user of `node` read `by`, and drop `node`."""
        node.replace_all_uses_with(by)
        if node in self.gradients:
            self.gradients.setdefault(by, self.gradients[node])
        self.erase(node)

    def erase(self, node: fx.Node) -> None:
        self.graph.erase_node(node)
        self.phases.pop(node, None)
        self.gradients.pop(node, None)

    def call(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node where the graph inserts now: of the phase, source line and marks of `like`."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update({key: like.meta[key] for key in _INHERITED if key in like.meta})
        given, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with getattr(like.meta.get("val"), "fake_mode", nullcontext()):  # a fill has no fake tensor to follow
            node.meta["val"] = target(*given, **named)
        self.phases[node] = self.phase(like)
        return node

    def text(self) -> str:
        """The step as text: stable from run to run, without paths, fit for a golden file."""
        names = short_names(self)
        lines = []
        for node, given in zip(self.placeholders, self.inputs):
            trained = " trained" if given.trained else ""
            lines.append(f"{names[node]}: {describe(node)}  # {given.role.name.lower()}{trained}")
        phase = None
        for node in self.computing():
            if self.phase(node) is not phase:
                phase = self.phase(node)
                lines.append(f"{phase.value}:")
            lines.append(f"  {names[node]}: {describe(node)} = {op_name(node)}"
                         f"({_arguments(node, names)})")
        results = ", ".join(_render(a, names) for a in self.graph.output_node().args[0])
        return "\n".join([*lines, *self._ahead(names), f"return {results}"]) + "\n"

    def _ahead(self, names: dict[fx.Node, str]) -> list[str]:
        """The text of what the host computes before, and where its numbers go."""
        if self.ahead is None:
            return []
        inputs, graph = [names[n] for n in self.placeholders], self.ahead.module.graph
        host = {n: inputs[i] for n, i in zip(graph.find_nodes(op="placeholder"), self.ahead.given)}
        lines = []
        for node in graph.nodes:
            if node.op not in ("placeholder", "output"):
                host[node] = f"h{len(lines)}"
                lines.append(f"  {host[node]}: {describe(node)} = {op_name(node)}({_arguments(node, host)})")
        given = [host[n] for n in graph.output_node().args[0]]
        ends = [f"  {inputs[i]} <- {name}" for i, name in zip((*self.ahead.numbers, *self.ahead.written), given)]
        return ["ahead, on the host:", *lines, *ends]

    def verify(self, same: bool = False) -> None:
        """Raise `VerifyError` unless the graph is well formed and safe to run in its order. Of the `same` graph and inputs
        as when it was verified last, only what else a pass may have changed is looked at."""
        if not same:
            self._verify_graph()
        lost = [n.name for n in self.computing() if n not in self.phases]
        if lost:
            raise VerifyError(f"nodes without a phase: {', '.join(lost[:5])}",
                              do="a pass that adds nodes says which phase they are in")
        bucket = bucket_fault(self.graph, self.bucket_bytes, self.phase)
        if bucket is not None:
            raise VerifyError(bucket[1], where=source_line(bucket[0]), do=bucket[2])

    def _verify_graph(self) -> None:
        self.graph.lint()
        if len(self.placeholders) != len(self.inputs):
            raise VerifyError(
                f"the graph has {len(self.placeholders)} inputs and {len(self.inputs)} roles",
                do="give a role to every input that a pass adds or removes")
        early = first_read_too_early(self.graph)
        if early is not None:
            raise VerifyError(f"the result of {early.name} is read before it has come",
                              where=source_line(early), do="read it behind a wait_tensor of it")
        stale_read = first_stale_read(self.graph)
        if stale_read is not None:
            read, write = stale_read
            raise VerifyError(
                f"{read.name} reads a value after {write.name} has overwritten it",
                where=source_line(read), do="keep every read of a tensor before its write")
        wrong = fault(self.graph, storage_roots, mutated_args)
        if wrong is not None:
            raise VerifyError(f"the tenant {wrong[0]} of the arena {wrong[1]}",
                              do="give it bytes that nothing else has from its first write to its last read")


def op_name(node: fx.Node) -> str:
    """The operator's short name, with its overload where that is not the default."""
    if node.op == "get_attr":
        return str(node.target)
    if isinstance(node.target, OPERATOR):
        name, overload = node.target._schema.name.split("::")[1], node.target._overloadname
        return name if overload in ("default", "Tensor", "") else f"{name}.{overload}"
    return getattr(node.target, "__name__", str(node.target))


def describe(node: fx.Node) -> str:
    """Type and shape of a node's value, such as ``f32[16, 8]``."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        kind = re.sub(r"^(?:float|complex|uint|int|bfloat)(\d+)$",
                      lambda m: {"f": "f", "c": "c", "u": "u", "i": "i", "b": "bf"}[m[0][0]] + m[1],
                      kind)
        return f"{kind}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (tuple, list)):
        return f"{len(value)} values"
    return type(value).__name__


def short_names(step: StepGraph) -> dict[fx.Node, str]:
    """``p0, p1, s0 ...`` for inputs by role, ``mm_0, mm_1 ...`` for nodes by operator."""
    counts: dict[str, int] = {}

    def next_name(stem: str, joint: str) -> str:
        counts[stem] = counts.get(stem, -1) + 1
        return f"{stem}{joint}{counts[stem]}"

    names = {node: next_name(given.role.value, "")
             for node, given in zip(step.placeholders, step.inputs)}
    for node in step.computing():
        names[node] = next_name(op_name(node).split(".")[0].strip("_"), "_")
    return names


def _render(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_render(v, names) for v in value) + "]"
    return str(value)


def _arguments(node: fx.Node, names: dict[fx.Node, str]) -> str:
    named = [f"{k}={_render(v, names)}" for k, v in sorted(node.kwargs.items())]
    return ", ".join([_render(a, names) for a in node.args] + named)


def source_line(node: fx.Node) -> str | None:
    """The user's line that made `node`, as ``file:line code``, from the trace's stack."""
    stack = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    frames = [(line, stack[i + 1] if i + 1 < len(stack) else "")
              for i, line in enumerate(stack) if line.startswith("File ")]
    for line, code in reversed(frames):
        match = re.match(r'File "(.*)", line (\d+)', line)
        if match and "/torch/" not in match[1] and not match[1].startswith(_OURS):
            return f"{match[1].rsplit('/', 1)[-1]}:{match[2]} {code}"
    return None


def nbytes(value: Any, number: Callable[[Any], Any] = hinted) -> Any:
    """Bytes of the storage behind a tensor value (nests are summed); 0 for numbers.

    An int, if a size is symbolic the one of this capture, since comparing symbols would tie the
    graph to them; with another `number` what that makes of the size.
    """
    if isinstance(value, Tensor):
        # A sparse tensor has no storage of its own; what it holds depends on the data.
        return number(value.untyped_storage().nbytes() if value.layout is torch.strided else 0)
    if isinstance(value, (tuple, list)):
        return sum(nbytes(v, number) for v in value)
    return 0


def each_nbytes(values: Iterable[Any], number: Callable[[Any], Any] = hinted) -> list[Any]:
    """`nbytes` of each; of values that show the same storage the first has all of it, and the others none."""
    seen: set[int] = set()
    found = []
    for value in values:
        size = nbytes(value, number)
        if size != 0:
            storage = value.untyped_storage()._cdata
            size = 0 if storage in seen else size
            seen.add(storage)
        found.append(size)
    return found


def same_bytes(a: fx.Node, b: fx.Node) -> bool:
    """Whether the storages of two values are as large as each other whatever the symbols are."""
    return nbytes(a.meta.get("val"), polynomial) == nbytes(b.meta.get("val"), polynomial)


def alike(value: fx.Node, other: fx.Node) -> bool:
    """Whether `value` is a tensor of the type and shape of `other`."""
    a, b = value.meta.get("val"), other.meta["val"]
    return isinstance(a, Tensor) and a.dtype == b.dtype and a.shape == b.shape
