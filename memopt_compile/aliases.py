"""Which values of a graph share storage, which are written, and where a read comes too late."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import fx

from .arena import WINDOW
from .collectives import OPERATOR, operands

# Views whose schema says that they are not, because autograd may treat them as new tensors.
UNDECLARED_VIEWS = {"aten::_unsafe_view", "aten::unsafe_split", "aten::unsafe_split_with_sizes",
                    "aten::unsafe_chunk", "aten::_reshape_alias",
                    # The result of a collective is not to be touched before it has come.
                    "_c10d_functional::wait_tensor"}


Places = tuple[tuple[int, str], ...]
Found = TypeVar("Found")


def once(find: Callable[[Any], Found]) -> Callable[[Any], Found]:
    """`find`, asked once for each operator. By identity: an operator's hash is a function of Python's, and every pass
    asks for every node."""
    known: dict[int, tuple[Any, Found]] = {}

    def found(target: Any) -> Found:
        if (entry := known.get(id(target))) is None:
            entry = known[id(target)] = target, find(target)  # kept with its operator, so that no other has its id
        return entry[1]

    return found


def mutated_args(node: fx.Node) -> list[fx.Node]:
    """The nodes whose storage `node` writes into."""
    return _operands(node, _written(node.target)) if isinstance(node.target, OPERATOR) else []


def aliased_args(node: fx.Node) -> list[fx.Node]:
    """The nodes whose storage the value of `node` shares: none if it owns its storage."""
    if isinstance(node.target, OPERATOR) and not (node.kwargs or _shared(node.target)):
        return []  # most operators
    source = node.args[0] if node.target is operator.getitem else node
    into = source.kwargs.get("out") if isinstance(source, fx.Node) else None
    if isinstance(into, list | tuple):  # no schema says so of a list of results
        return list(into) if source is node else [into[node.args[1]]]
    if source is not node:
        return aliased_args(source) if isinstance(source, fx.Node) else []
    return _operands(node, _shared(node.target)) if isinstance(node.target, OPERATOR) else []


def viewed(node: fx.Node) -> Iterator[fx.Node]:
    """The values that `node` is nothing but a view of, the nearest first."""
    while len(shared := aliased_args(node)) == 1 and not mutated_args(node) and not node.is_impure():
        node = shared[0]
        yield node


@once
def _written(target: Any) -> Places:
    return tuple((i, argument.name) for i, argument in enumerate(target._schema.arguments)
                 if argument.alias_info is not None and argument.alias_info.is_write)


@once
def _shared(target: Any) -> Places:
    schema = target._schema
    returned = set().union(*(r.alias_info.before_set for r in schema.returns
                             if r.alias_info is not None))
    # "*" is how `split` and `unbind` say that their list holds views of the argument.
    return tuple(
        (i, argument.name) for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and (
            argument.alias_info.before_set & returned or "*" in argument.alias_info.after_set)
        or i == 0 and schema.name in UNDECLARED_VIEWS)


def _operands(node: fx.Node, places: Places) -> list[fx.Node]:
    if not places:  # most often
        return []
    values = (node.kwargs.get(name, node.args[i] if i < len(node.args) else None) for i, name in places)
    return [v for value in values for v in (value if isinstance(value, list | tuple) else (value,))
            if isinstance(v, fx.Node)]


def storage_roots(graph: fx.Graph) -> dict[fx.Node, frozenset[fx.Node]]:
    """For every node, the nodes that own the storages its value lives in; a tenant of the arena its bytes."""
    roots: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        shared = aliased_args(node) if node.op == "call_function" and node.target is not WINDOW else []
        found = [roots[a] for a in shared] or [frozenset([node])]
        roots[node] = found[0] if len(found) == 1 else frozenset().union(*found)
    return roots


def first_stale_read(graph: fx.Graph) -> tuple[fx.Node, fx.Node] | None:
    """A node that reads, through any alias, what an earlier node has overwritten.

    Values are functional, so a read means the value from before the write, unless it reads
    the writing node itself; ``copy_(p, p)`` shows what is in p by now.
    """
    roots = storage_roots(graph)
    writes = {node: args for node in graph.nodes if (args := mutated_args(node))}
    ever = {r for args in writes.values() for a in args for r in roots[a]}
    watched = {node: shared for node, owners in roots.items() if (shared := owners & ever)}
    version: dict[fx.Node, int] = {}  # writes so far, by owner
    seen: dict[fx.Node, dict[fx.Node, int]] = {}  # node -> owner -> version its value shows
    writer: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for argument in operands(node):
            for root in watched.get(argument, ()):
                # Returning an updated input as a result is how a step hands it back.
                if seen[argument].get(root, 0) != version.get(root, 0) and node.op != "output":
                    if node.target is not torch.ops.aten.copy_.default or node.args[0] is not node.args[1]:
                        return node, writer[root]
        for root in {r for a in writes.get(node, ()) for r in roots[a]}:
            version[root] = version.get(root, 0) + 1
            writer[root] = node
        if node in watched:
            seen[node] = {root: version.get(root, 0) for root in watched[node]}
    return None
