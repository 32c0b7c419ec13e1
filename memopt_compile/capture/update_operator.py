"""The update of a parameter as one operator while AOTAutograd traces the step, and its arithmetic behind that.

AOTAutograd goes through every operator twice, and three quarters of a transformer's are the optimizer's: the same
twenty for each parameter. Rules:

1. `folded` takes what capture has marked as copies of one parameter's update (`capture.update_copies`) out of Dynamo's
   graph, and puts an `Update` there for each, whose arithmetic is traced once for a kind of parameter.
2. `unfolded` puts that arithmetic in the place of ``memopt::update`` when AOTAutograd is done. No pass and no
   lowering sees the operator.
3. An update that is read from outside, or in which there is anything but tensors of known sizes, stays as it is.

The step's graph is the same node by node.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .. import compat
from ..compat import trace

COPY_OF = "memopt: (kind of parameter, parameter)"  # a key of `node.meta`

_library = torch.library.Library("memopt", "FRAGMENT")
_library.define("update(Tensor[] given, int kind) -> Tensor[]")
UPDATE = torch.ops.memopt.update.default
_kinds: dict[int, Update] = {}
_numbers = itertools.count()


@torch.library.register_fake("memopt::update", lib=_library)
def _(given: list[Tensor], kind: int) -> list[Tensor]:
    return [torch.empty_like(given[i]) for i in _kinds[kind].written]


@dataclass(frozen=True, eq=False)
class Update:
    """What an optimizer does to one parameter.

    ``module`` writes in place, as Dynamo traced it; ``graph`` is the ATen graph of the same with the new
    values of the tensors at ``written`` as results. ``number`` names it in a graph.
    """

    module: fx.GraphModule
    graph: fx.Graph
    written: tuple[int, ...]
    number: int

    __name__ = "update"  # for the graph's code

    def __call__(self, *given: Tensor) -> None:
        if not trace.is_functional(given[0]):
            self.module(*given)  # the ordinary path, or a comparison with it
            return
        for place, value in zip(self.written, UPDATE(list(given), self.number)):
            trace.replace_functional(given[place], value)


@contextlib.contextmanager
def folded(gm: fx.GraphModule, example_inputs: Sequence[Any], decompositions: Mapping[Any, Any]) -> Iterator[None]:
    """Put an `Update` in the place of each update of `gm` that has copies. What is traced of `gm` inside is
    for `unfolded`."""
    mode = compat.detect_fake_mode(list(example_inputs))
    kinds: dict[Any, dict[Any, list[fx.Node]]] = defaultdict(lambda: defaultdict(list))
    for node in gm.graph.nodes:
        if COPY_OF in node.meta:
            kind, parameter = node.meta[COPY_OF]
            kinds[kind][parameter].append(node)
    made = {}
    for copies in kinds.values():
        reads = [_reads(nodes) for nodes in copies.values()]
        if len(copies) == 1 or None in reads or len({(len(n), len(r)) for n, r in zip(copies.values(), reads)}) > 1:
            continue
        update = _update(gm, next(iter(copies.values())), reads[0], mode, decompositions)
        if update is None:
            continue
        made[update.number] = update
        for nodes, given in zip(copies.values(), reads):
            with gm.graph.inserting_after(nodes[-1]):
                call = gm.graph.call_function(update, tuple(given))
            call.meta = {**nodes[-1].meta, "example_value": None}
            for node in reversed(nodes):
                gm.graph.erase_node(node)
    if made:
        gm.recompile()
    _kinds.update(made)
    try:
        yield
    finally:
        for number in made:
            del _kinds[number]


def _reads(nodes: list[fx.Node]) -> list[fx.Node] | None:
    """What an update reads from outside, in order; None if it is not by itself (rule 3)."""
    inside = set(nodes)
    found = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))
    values = [n.meta.get("example_value") for n in found]
    alone = all(user in inside for n in nodes for user in n.users)
    known = all(isinstance(v, compat.FakeTensor) and all(type(n) is int for n in (*v.shape, *v.stride()))
                for v in values)  # the arithmetic of one size is not that of another
    return found if alone and known else None


def _update(gm: fx.GraphModule, nodes: list[fx.Node], given: list[fx.Node], mode: Any,
            decompositions: Mapping[Any, Any]) -> Update | None:
    graph, known = fx.Graph(), {}
    for node in given:
        known[node] = graph.placeholder(f"given_{len(known)}")
    for node in nodes:
        known[node] = graph.node_copy(node, known.__getitem__)
    graph.output(None)
    module = fx.GraphModule(gm, graph)

    def new_values(*tensors: Tensor) -> list[Tensor]:
        module(*tensors)
        return list(tensors)

    with mode:  # AOTAutograd's, which is not Dynamo's
        values = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
                  for v in (n.meta["example_value"] for n in given)]
    traced = trace.traced_functionally(new_values, values, decompositions)
    results = traced.output_node().args[0]
    written = tuple(i for i, n in enumerate(results) if n.op != "placeholder")
    if traced.find_nodes(op="get_attr"):
        return None
    traced.output_node().args = ([results[i] for i in written],)
    return Update(module, traced, written, next(_numbers))


def unfolded(gm: fx.GraphModule) -> fx.GraphModule:
    """Put the arithmetic of every ``memopt::update`` of the ATen graph in its place."""
    for node in gm.graph.find_nodes(op="call_function", target=UPDATE):
        given, number = node.args
        body = _kinds[number].graph
        known = dict(zip(body.find_nodes(op="placeholder"), given))
        with gm.graph.inserting_before(node):
            for inner in body.nodes:
                if inner.op == "call_function":
                    known[inner] = copy = gm.graph.node_copy(inner, known.__getitem__)
                    copy.meta = {**node.meta, "val": inner.meta["val"]}
        results = [known[n] for n in body.output_node().args[0]]
        for item in list(node.users):
            assert item.target is operator.getitem
            item.replace_all_uses_with(results[item.args[1]])
            gm.graph.erase_node(item)
        gm.graph.erase_node(node)
    return gm
