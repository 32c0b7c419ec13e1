"""Numbers that a step reads off its tensors (``loss.item()``) are read when it has run.

Dynamo follows such a number as a symbol, through what Python computes from it, until it leaves the step.
No kernel needs it before: the step's graph returns the tensor, as it was at that place, and all that is
Python's is done with the numbers behind it. A number that goes into a tensor again stays a break.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .. import compat
from ..compat import breaks, used_up
from ..compat.decided import PYTHONS, is_given
from ..errors import OptionError
from ..step_graph import source_line
from . import telling

EXTREMES = (*PYTHONS, torch.max, torch.min)  # as which Python's are traced


class Needed(Exception):
    """A tensor is computed from a number that is read off another."""


def waits(tx: Any, tensor: Any, notes: Any) -> bool:
    """Whether the trace goes past ``tensor.item()``. Where no more of the step is to come its graph may end too, if
    what is done with the number cannot be traced."""
    value = compat.fake_value(tensor)
    ended = _is_over(tx, notes)
    leaks = getattr(value, "grad_fn", None) is not None and not used_up.used_up(tx.output, value)
    if not notes.reads_later or value.dtype is torch.bool or value.is_complex():
        return False
    if ended and not leaks:
        if not notes.reads_behind_later:
            telling.note_end(notes, breaks.line_now(tx.output))
            return False
        notes.reads_behind += 1
    notes.reads += 1
    return True


def _is_over(tx: Any, notes: Any) -> bool:
    """Whether no more of the step is to come."""
    return notes.backwards and notes.updates and not any(
        breaks.is_ahead(tx.output, name) for name in ("backward", "step"))


def end_behind(tx: Any, notes: Any) -> None:
    """End the graph where the step is over, or leave a frame to Python that is all behind one. The next call would need
    another graph of what is computed there."""
    if breaks.demands_one_graph(tx.output):
        return
    if _is_over(tx, notes):
        if not breaks.can_end(tx.output):
            return
        telling.note_end(notes, breaks.line_now(tx.output))
        breaks.break_graph("all of a list that grows is read", "", "")
    if notes.stepped and not (notes.backwards or notes.updates or breaks.is_differentiated(tx.output)
                              or breaks.is_named(tx.output, "backward")):
        breaks.run_in_eager("all of a list that grows is read")


def made_of_given(gm: fx.GraphModule) -> list[int]:
    """Which results Python computes from numbers of the user's alone (``group["lr"] *= 0.9``). Capture has made tensors
    of these, and what the user gets has to be a number again."""
    made: set[fx.Node] = set()
    for node in gm.graph.nodes:
        computed = node.op == "call_function" and (
            getattr(node.target, "__module__", "") in ("_operator", "math") or node.target in EXTREMES
            or node.target is torch.scalar_tensor and any(user.op != "output" for user in node.users))  # of a count
        whole = isinstance(node.meta.get("example_value"), torch.SymInt | torch.SymFloat)  # a count, or a size
        if is_given(node) or whole or computed and node.all_input_nodes and made.issuperset(node.all_input_nodes):
            made.add(node)
    results = gm.graph.output_node().args[0]
    return [i for i, value in enumerate(results) if value in made and value.op != "placeholder" and isinstance(
        value.meta.get("example_value"), Tensor)]


def with_numbers(run: Callable, places: Sequence[int]) -> Callable:
    """`run` with numbers for its results at `places`."""
    def run_with_numbers(*args: Any) -> list[Any]:
        values = list(run(*args))
        for i in places:
            values[i] = values[i].item()
        return values

    return run_with_numbers


def take_out(gm: fx.GraphModule, reads: bool = True) -> Callable[[Callable], Callable] | None:
    """Have the Dynamo graph return the tensors that numbers are read off, and none of the numbers that Python computes.
    What then makes its results of a compiled program's; None if it has no such numbers. Without `reads` it is for the
    graph to read them.

    Raises:
        Needed: it cannot be done.
    """
    read = [n for n in gm.graph.find_nodes(op="call_method", target="item") if reads and not is_given(n.args[0])]
    output = gm.graph.output_node()
    results = list(output.args[0])
    python = _behind(read, output)
    late = [i for i, value in enumerate(results) if value in python or _is_of_given(value)]
    if not (read or late):
        return None
    program, given = _program(gm.graph, read, python, [results[i] for i in late])
    inputs = gm.graph.find_nodes(op="placeholder")
    places = [inputs.index(n) for n in given]
    tensors = [_as_it_is(gm.graph, node) for node in read]
    kept = [value for i, value in enumerate(results) if i not in late]
    output.args = ((*kept, *tensors),)
    for node in reversed(gm.graph.nodes):  # these numbers the step would be compiled again for, each time
        if node.op != "placeholder" and not node.users and (
                node in python or node.target is torch.scalar_tensor or isinstance(node.meta.get("example_value"), torch.SymFloat)):
            gm.graph.erase_node(node)
    gm.recompile()

    def reading(run: Callable) -> Callable:
        def run_and_read(*args: Any) -> list[Any]:
            values = list(run(*args))
            numbers = [t.item() for t in values[len(kept):]]
            del values[len(kept):]
            for i, value in zip(late, program(*numbers, *(args[p] for p in places)), strict=True):
                values.insert(i, value)
            return values

        return run_and_read

    return reading


def _is_of_given(result: Any) -> bool:
    """Whether this is a number, made of such numbers alone (``self.scale *= 2``), in the tensor as which Dynamo
    returns it. A graph would be compiled again for each of its values."""
    if not isinstance(result, fx.Node) or result.target is not torch.scalar_tensor:
        return False
    stack = list(result.all_input_nodes)
    for node in stack:  # which grows
        if isinstance(node.meta.get("example_value"), Tensor) and not is_given(node):
            return False
        stack += [] if node.op == "placeholder" else node.all_input_nodes
    return bool(stack)


def _behind(read: Sequence[fx.Node], output: fx.Node) -> list[fx.Node]:
    """The reads and all that is computed from them, in order. These have to be numbers, or the tensors as which
    Dynamo returns numbers."""
    found: set[fx.Node] = set()
    stack = list(read)
    while stack:
        node = stack.pop()
        if node in found or node is output:
            continue
        if isinstance(node.meta.get("example_value"), Tensor) and (
                node.target is not torch.scalar_tensor or set(node.users) != {output}):
            raise Needed("a tensor is computed from a number that is read off another")
        found.add(node)
        stack.extend(node.users)
    return [node for node in output.graph.nodes if node in found]


def _program(graph_of_step: fx.Graph, read: Sequence[fx.Node], python: Sequence[fx.Node],
             results: Sequence[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node]]:
    """What Python does with the numbers: a function of those that are read and of inputs of the step. And which."""
    graph = fx.Graph()
    needed = {*python, *results}
    for node in reversed(graph_of_step.nodes):
        if node in needed and node not in read:
            needed.update(node.all_input_nodes)
    given = [n for n in graph_of_step.nodes if n in needed and n.op == "placeholder"]
    made = {node: graph.placeholder(node.name) for node in (*read, *given)}
    for node in graph_of_step.nodes:
        if node in needed and node not in made:
            if node not in python and node not in results and isinstance(node.meta.get("example_value"), Tensor):
                raise Needed("a number is computed from another tensor too")
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[r] for r in results))
    return fx.GraphModule(torch.nn.Module(), graph), given


def _as_it_is(graph: fx.Graph, read: fx.Node) -> fx.Node:
    """What a number is read off, as it is at that place: the step may change it later."""
    value = read.args[0]
    fake = value.meta["example_value"]
    if of_ranks := hasattr(fake, "placements"):
        _check_whole(fake, read)
    for method in ("detach", *(["to_local"] if of_ranks else []), "clone"):
        with graph.inserting_before(read):
            made = graph.call_method(method, (value,))
        with (fake.to_local() if hasattr(fake, "placements") else fake).fake_mode:
            fake = getattr(fake, method)()
        made.meta = {**value.meta, "example_value": fake}
        value = made
    return value


def _check_whole(fake: Any, read: fx.Node) -> None:
    """A number is read off a DTensor that all ranks have alike; of another one PyTorch gives this rank's part.

    Raises:
        OptionError: ranks have other values.
    """
    if not all(placement.is_replicate() for placement in fake.placements):
        raise OptionError("a number is read off a DTensor of which each rank has a part, as a sum or norm of what "
                          "model.parameters() has is: it would be the number of this part", where=source_line(read) or
                          "the step", do="read it off .full_tensor(), in this line and on all ranks, or off the "
                          "parameters that modules give out (layer.weight), which are whole")
