"""Cut a scheduled step into pieces, so that each distinct one is compiled once.

The step's order is the plan. Cutting keeps it: a piece is a stretch of that order, and only
within a piece may a compiler reorder. Repeated stretches (the forward of a layer, the backward
and update of a layer, a micro-batch) are found by structure and come out as equal pieces.

Rules:

1. Only operators that compute are placed. A view is made again inside every piece that reads
   it; what crosses a cut is the storage's owner. So no two inputs of a piece share storage,
   and a compiler that sees one piece sees every alias in it. (A view of a parameter handed to
   a piece that also writes the parameter gives wrong numbers without an error.) So is a number that
   the graph tells, which every kernel would else load: Inductor counts loads, and stores what has many.
2. The items of an operator with several results stay with it.
3. An updated input read in a later piece is read from the input itself.
4. Seeds of random numbers are drawn between the pieces and handed in, since the position of a
   seed in the table would make equal layers different. So are results read as Python numbers,
   and slices of inputs that nothing writes (the micro-batches of a batch): their offsets would
   make equal micro-batches different, and nobody can tell such a view from a copy.
5. A step with symbolic sizes among its inputs or results, Python numbers inside, operators that hold
   subgraphs, or writes into anything but inputs is one piece (`one_piece`): its values cannot be handed on
   as tensors that stay what they are. Of sizes that only the data tell there may be some within a piece:
   no cut comes between what makes such a size and the last that reads a value of it.
6. Collectives and their readers are in one piece: a result on its way is not handed over.
7. Where the step may be taken back (`finiteness`) or ends by a check of data (`checks`), or a copy between host and
   device begins or has to be over (`transfers`), there is a cut, and the program does that.
8. With an arena the same goes for collectives, their waits, and whatever writes a tenant. So what comes
   into bytes of the arena comes when the schedule says so, and pieces see tenants as any other input:
   no two that a piece is given share bytes. (Rule 6 has nothing left to do then.)
9. Where one backward is over and the next begins, or the forward of it, there is a cut but within a repetition: else Inductor sums up
   gradients of both in one loop, and so holds the activations of both.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from ..collectives import is_collective
from ..step_graph import Phase, StepGraph, aliased_args, mutated_args, nbytes
from .between import SEEDS, in_its_place, is_number
from .repetition import cuts

OWNED = "arg"  # Inductor holds inputs so named for its caller's, and takes any other for one it may free

_OPERATOR = type(torch.ops.aten.add.Tensor)
_ITEM = "aten._local_scalar_dense.default"
_SLICED = "slice of an input that nothing writes"
_HOST = (SEEDS, "prims.inductor_lookup_seed.default", _ITEM)


@dataclass(frozen=True)
class Piece:
    """A stretch of the step as a graph of its own, whose attributes are those of ``owner``.

    ``inputs`` and ``outputs`` are the step's nodes that its placeholders and results stand
    for. Pieces with equal ``key`` are the same program; None is like no other.
    """

    graph: fx.Graph
    inputs: tuple[fx.Node, ...]
    outputs: tuple[Any, ...]
    key: str | None
    first: fx.Node | None = None
    owner: torch.nn.Module = field(default_factory=torch.nn.Module)

    def module(self) -> fx.GraphModule:
        """A copy of the graph with its code, which costs more to write than the graph: ask for it once a key."""
        return fx.GraphModule(self.owner, copy.deepcopy(self.graph))


# ------------------------------------------------------------------------ kinds of node


def is_host(node: fx.Node) -> bool:
    """Whether the program runs `node` itself, between the pieces (rule 4)."""
    of_a_number = str(node.target) == "aten.scalar_tensor.default" and bool(node.all_input_nodes)
    return node.op == "call_function" and (
        str(node.target) in _HOST or of_a_number or is_number(node) or _SLICED in node.meta or in_its_place(node))


def mark_slices(step: StepGraph) -> None:
    """Note which nodes are slices of inputs that nothing writes (rule 4)."""
    written = {root(a) for n in step.graph.nodes for a in mutated_args(n)}
    for node in step.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor):
        # as_strided counts from the start of the storage, which a handed slice does not tell.
        strided = any(u.target is torch.ops.aten.as_strided.default for u in node.users)
        if node.args[0].op == "placeholder" and node.args[0] not in written and not strided:
            node.meta[_SLICED] = True


def is_view(node: fx.Node) -> bool:
    return (node.op == "call_function" and not mutated_args(node) and bool(aliased_args(node))
            and _SLICED not in node.meta and not in_its_place(node))


def is_item(node: fx.Node) -> bool:
    """One result of an operator with several, each with storage of its own."""
    return node.target is operator.getitem and not is_view(node)


def body(step: StepGraph) -> list[fx.Node]:
    """The operators that compute, in schedule order (rules 1, 2 and 4), without dead ones."""
    needed: set[fx.Node] = set()
    for node in reversed(step.graph.nodes):
        if node in needed or node.op == "output" or node.is_impure() or mutated_args(node):
            needed.update((node, *node.all_input_nodes))
    return [n for n in step.graph.nodes if n.op == "call_function" and n in needed
            and not (is_host(n) or is_view(n) or is_item(n))]


def can_cut(step: StepGraph) -> bool:
    """Whether every value of the step can be handed from piece to piece (rule 5)."""
    written = {root(a) for n in step.graph.nodes for a in mutated_args(n)}
    if any(owner.op != "placeholder" for owner in written):
        return False
    for node in step.graph.nodes:
        if node.op == "output" or node.op == "placeholder" and not node.users:
            continue  # torch passes process groups in, which nothing reads
        if str(node.target) == _ITEM:
            later = [u for u in node.users if u.op != "output" and not is_host(u)]
            if later or root(node.args[0]) in written:
                return False
        elif node.op in ("placeholder", "get_attr"):
            value = constant(step, node) if node.op == "get_attr" else node.meta.get("val")
            if not isinstance(value, Tensor) or _symbolic(value):
                return False
        elif not (isinstance(node.target, _OPERATOR) or node.target is operator.getitem or _is_size(node)):
            return False
    nodes = body(step) if any(map(_has_sizes, step.graph.nodes)) else []
    return not (any(map(_has_sizes, program_reads(step))) or set(_forced(step, nodes)) & set(_together(nodes)))


def constant(step: StepGraph, node: fx.Node) -> Any:
    """What a ``get_attr`` node reads from the module."""
    value: Any = step.module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def _has_sizes(node: fx.Node) -> bool:
    """Whether `node` is computed and has, or is, a size that only the data tell."""
    return node.op == "call_function" and str(node.target) != _ITEM and _symbolic(node.meta.get("val"))


def _symbolic(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_symbolic(v) for v in value)
    if isinstance(value, Tensor):
        return any(not isinstance(n, int) for n in (*value.shape, *value.stride(),
                                                    value.storage_offset()))
    return value is not None


def root(node: fx.Node) -> fx.Node:
    """What to hand over so that `node` can be read elsewhere, if that is a single value."""
    while is_view(node) or mutated_args(node) and not in_its_place(node):
        node = (aliased_args(node) or mutated_args(node))[0]
    return node


def sources(node: fx.Node) -> Iterable[fx.Node]:
    """The values that `node` reads, seen through views, without numbers."""
    for argument in node.all_input_nodes:
        if is_view(argument):
            yield from sources(argument)
        elif not is_number(argument):
            yield argument


# ------------------------------------------------------------------------ where to cut


def cut_points(nodes: Sequence[fx.Node], borders: Sequence[int] = ()) -> list[int]:
    """Positions in `nodes` (a `body`) at which a new piece begins, without 0. Outside repetitions there is one at each of `borders`."""
    known: dict[str, int] = {}
    labels = np.array([known.setdefault(label(n), len(known)) for n in nodes], dtype=np.int64)
    place = {n: i for i, n in enumerate(nodes)}
    reads = [(place[owner], i) for i, n in enumerate(nodes)
             for owner in {s.args[0] if is_item(s) else s for s in sources(n)} if owner in place]
    sizes = np.array([0 if aliased_args(n) else nbytes(n.meta.get("val")) for n in nodes])

    def crossing(span: int) -> np.ndarray:
        return _crossing(len(nodes), reads, sizes, span)

    return sorted(set(cuts(labels, crossing, borders, 0, len(nodes))).difference((0, len(nodes)), _together(nodes)))


def _together(nodes: Sequence[fx.Node]) -> Iterable[int]:
    """Positions in `nodes` at which no cut may be."""
    # From the first collective to the last reader of one (rule 6).
    whole = [i for i, n in enumerate(nodes) if any(map(is_collective, (n, *sources(n))))]
    if whole:
        yield from range(whole[0] + 1, whole[-1] + 1)
    place = {n: i for i, n in enumerate(nodes)}
    for reader, i in place.items():  # rule 5
        for source in filter(_has_sizes, sources(reader)):
            yield from range(place[source.args[0] if is_item(source) else source] + 1, i + 1)


def label(node: fx.Node) -> str:
    """What a node does, without which nodes it reads: equal in every layer."""
    shapes = [_meta(a.meta.get("val")) for a in node.all_input_nodes]
    fixed = [_render(a, lambda _: "%") for a in (*node.args, *node.kwargs.items())]
    return f"{node.target}{fixed}{shapes}{_meta(node.meta.get('val'))}"


def _crossing(count: int, reads: list[tuple[int, int]], sizes: np.ndarray,
              span: int) -> np.ndarray:
    """Bytes (and one for each value) that a cut before each position keeps from being fused:
    values read again within `span`. What is saved for much later costs nothing more."""
    last: dict[int, int] = {}
    for made, used in reads:
        if used - made <= span:
            last[made] = max(used, last.get(made, 0))
    change = np.zeros(count + 2, dtype=np.int64)
    for made, used in last.items():
        change[made + 1] += sizes[made] + 1
        change[used + 1] -= sizes[made] + 1
    return np.cumsum(change)[:count + 1]


def _borders(step: StepGraph, nodes: Sequence[fx.Node]) -> list[int]:
    """Where one backward is over, in front of the next one's first gradient: by forward that goes on or, with half of its gradients
    there, by the last of these (rule 9)."""
    number = [max(map(step.gradients.__getitem__, step.gradients.keys() & {n, *filter(is_item, n.users)}), default=0) for n in nodes]
    first = sorted({at: i for i, at in reversed(list(enumerate(number))) if at}.values())
    forward, found = [step.phase(n) is Phase.FORWARD for n in nodes], []
    for begin, end in itertools.pairwise(first):
        behind = [i for i in range(begin + 1, end) if forward[i] and not forward[i - 1]]
        made = [i for i in range(end) if number[i] == number[begin]]
        if not behind and 2 * len(made) >= number.count(number[begin]):
            behind = [made[-1] + 1]
        found += behind
    return found


# ------------------------------------------------------------------------ pieces as graphs


def pieces(step: StepGraph) -> list[Piece]:
    """The step cut at `cut_points`. Every piece hands on what later ones, or the program's
    own operators and results, still read."""
    mark_slices(step)
    nodes = body(step)
    points = sorted({0, *cut_points(nodes, _borders(step, nodes)), *_forced(step, nodes), len(nodes)})
    stretches = [nodes[a:b] for a, b in zip(points, points[1:]) if a < b]
    drafts = [_draft(stretch) for stretch in stretches]
    wanted = {n for inputs, _ in drafts for n in inputs} | program_reads(step)
    return [_finish(graph, inputs, [(n, made[n]) for n in made if n in wanted], stretch[0])
            for stretch, (inputs, (graph, made)) in zip(stretches, drafts)]


def _forced(step: StepGraph, nodes: list[fx.Node]) -> list[int]:
    """Positions in `nodes` at which there has to be a cut (rule 7)."""
    ahead = itertools.accumulate(map(set(nodes).__contains__, step.graph.nodes))
    return [i for i, n in zip(ahead, step.graph.nodes) if in_its_place(n)]


def program_reads(step: StepGraph) -> set[fx.Node]:
    """Values that the program between the pieces reads: for results, numbers and seeds."""
    reads = {s for n in step.graph.nodes if is_host(n) or n.op == "output" for s in sources(n)}
    return reads | set(map(root, reads))


def one_piece(step: StepGraph) -> Piece:
    """The whole step as one piece, its inputs and results as they are."""
    graph, env = fx.Graph(), {}
    for i, node in enumerate(step.placeholders):
        env[node] = graph.placeholder(f"{OWNED}{i}")
        env[node].meta = dict(node.meta)
    results = graph.graph_copy(step.graph, env)
    graph.output(tuple(results))
    keyed = can_cut(step) and not step.graph.find_nodes(op="get_attr") and not any(map(_has_sizes, graph.nodes))
    key = key_of(graph) if keyed else None
    return Piece(graph, tuple(step.placeholders), tuple(step.graph.output_node().args[0]), key,
                 next(iter(step.computing()), None), step.module)


Draft = tuple[list[fx.Node], tuple[fx.Graph, dict[fx.Node, fx.Node]]]


def _draft(stretch: list[fx.Node]) -> Draft:
    """Inputs by first use, and the graph without its output. Names count up, so that equal
    stretches give equal text."""
    inside = {n for node in stretch for n in (node, *node.users) if n is node or is_item(n)}
    graph, env, inputs = fx.Graph(), {}, []

    def outer(node: fx.Node) -> Iterable[fx.Node]:
        for argument in node.all_input_nodes:
            if is_view(argument):
                yield from outer(argument)
            elif argument not in inside and not is_number(argument):
                yield root(argument)

    for node in stretch:
        for source in outer(node):
            if source not in env:
                name = OWNED if source.op == "placeholder" else "a"
                env[source] = graph.placeholder(f"{name}{len(inputs)}")
                env[source].meta = {"val": _handed(source)}
                inputs.append(source)

    def copy(node: fx.Node) -> fx.Node:
        new = graph.create_node(node.op, node.target, fx.map_arg(node.args, use),
                                fx.map_arg(node.kwargs, use), name=f"n{len(env)}")
        new.meta = dict(node.meta)
        env[node] = new
        return new

    def use(node: fx.Node) -> fx.Node:
        if node in env:
            return env[node]
        return copy(node) if is_view(node) or is_number(node) else env[root(node)]

    for node in stretch:
        copy(node)
        for item in node.users:
            if is_item(item):
                copy(item)
    return inputs, (graph, {n: env[n] for n in env if n in inside})


def _handed(node: fx.Node) -> Any:
    """The value of `node` as a piece gets it: a slice begins where its first element is."""
    value = node.meta["val"]
    if _SLICED in node.meta:
        return value.new_empty_strided(value.shape, value.stride())
    return value


def _finish(graph: fx.Graph, inputs: list[fx.Node], handed: list[tuple[fx.Node, fx.Node]],
            first: fx.Node) -> Piece:
    graph.output(tuple(inner for _, inner in handed))
    key = None if any(map(_has_sizes, graph.nodes)) else key_of(graph)  # what is known of a size is not in the key
    return Piece(graph, tuple(inputs), tuple(n for n, _ in handed), key, first)


# ------------------------------------------------------------------------ equal pieces


def key_of(graph: fx.Graph) -> str:
    """A digest of everything that the compiled code depends on."""
    names = {n: f"%{i}" for i, n in enumerate(graph.nodes)}
    lines = [f"{n.op} {n.target if n.op in ('call_function', 'placeholder') else ''}"
             f"{[_render(a, names.__getitem__) for a in (*n.args, *n.kwargs.items())]}"
             f"{_meta(n.meta.get('val'))}" for n in graph.nodes]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _render(value: Any, name: Callable[[fx.Node], str]) -> str:
    if isinstance(value, fx.Node):
        return name(value)
    if isinstance(value, (tuple, list)):
        return "[" + ",".join(_render(v, name) for v in value) + "]"
    return f"{type(value).__name__}:{value!r}"


def _meta(value: Any) -> str:
    if isinstance(value, Tensor):
        # Where a view begins follows from its operator's arguments.
        return f"{value.dtype}{list(value.shape)}{list(value.stride())}@{value.device}"
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(map(_meta, value)) + ")"
    return repr(value)
