"""A gradient of a gradient that goes through a compiled piece (`torch.compile(critic, backend="memopt")`).

AOTAutograd's backward cannot be differentiated: `grad(critic(x).sum(), x, create_graph=True)` ends in PyTorch's
error. Here, where autograd asks for a gradient that can be differentiated, eager computes the piece again from its
inputs, and eager's gradients take the place of the compiled ones:

    before   slope = compiled backward(...)                     no second backward
    after    slope = grad(piece(*inputs), inputs, tangents)     with its graph

Effect on memory: none for the others, as inputs are held weakly; where it happens, the piece's activations twice.
On numerics: eager's. Refused, with the reason: inputs that are gone or were changed since, by the piece too (the
statistics of BatchNorm), and pieces that draw random numbers.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .errors import CaptureError

COMPILED = "CompiledFunctionBackward"  # AOTAutograd's node


def twice_differentiable(run: Callable, piece: Callable, where: str, device: torch.device) -> Callable:
    """`run`, compiled from `piece`, with gradients that can be differentiated where that is asked for."""
    aligned: bool | None = None

    def differentiable(*inputs: Any) -> Any:
        nonlocal aligned
        if not torch.is_grad_enabled():
            return run(*inputs)
        versions = _versions(inputs)
        outputs = run(*inputs)
        made = backward_of(inputs, outputs)
        if made is None:
            return outputs
        node, position = made
        if aligned is None:
            aligned = edges(inputs) == [edge for edge, _ in node.next_functions]
        if aligned:
            mode = torch.autocast(device.type, torch.get_autocast_dtype(device.type),
                                  torch.is_autocast_enabled(device.type))
            again = functools.partial(
                _gradients, piece, [weakref.ref(i) if isinstance(i, torch.Tensor) else i for i in inputs],
                position, versions == _versions(inputs) and versions, mode, where, device)
            _replace_gradients(node, again)
        return outputs

    return differentiable


def backward_of(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Any, dict[int, int]] | None:
    """The one node that AOTAutograd made of a piece, and which of the `outputs` each of its results is."""
    before = {i.grad_fn for i in inputs if isinstance(i, torch.Tensor)}
    made = [(o.grad_fn, k, o.output_nr) for k, o in enumerate(outputs)
            if isinstance(o, torch.Tensor) and type(o.grad_fn).__name__ == COMPILED and o.grad_fn not in before]
    if not made or any(node is not made[0][0] for node, _, _ in made):
        return None
    return made[0][0], {number: k for _, k, number in made}


def edges(inputs: Sequence[Any]) -> list[Any]:
    """Where autograd carries the gradient of each tensor."""
    return [torch.autograd.graph.get_gradient_edge(i).node if i.requires_grad else None
            for i in inputs if isinstance(i, torch.Tensor)]


def _versions(inputs: Sequence[Any]) -> list[int]:
    return [i._version for i in inputs if isinstance(i, torch.Tensor) and not i.is_inference()]


def _replace_gradients(node: Any, again: Callable) -> None:
    def before(tangents: Sequence[torch.Tensor | None]) -> Any:
        if not torch.is_grad_enabled():
            return None, None
        return (tuple(None if t is None else t.detach() for t in tangents),
                lambda gradients: again(tangents, gradients))

    hook_if_asked(node, before)


def hook_if_asked(node: Any, ask: Callable) -> None:
    """Have `ask(tangents)` say what `node` is given instead, and by which function its gradients are changed.

    None where nothing is to change. Autograd keeps what a node is given until the node is done, if it has a hook behind:
    so it gets one only for the calls that need it.
    """
    held = weakref.ref(node)

    @torch.compiler.disable  # as long as a broken step runs, Dynamo looks at every function
    def before(tangents: Sequence[torch.Tensor | None]) -> Any:
        instead, change = ask(tangents)
        if change:
            @torch.compiler.disable
            def after(gradients: Sequence[torch.Tensor | None], tangents: Any) -> Any:
                handle.remove()
                return change(gradients)

            handle = held().register_hook(after)  # type: ignore[union-attr]
        return instead

    node.register_prehook(before)


def _gradients(piece: Callable, held: Sequence[Any], position: dict[int, int], versions: Any, mode: Any, where: str,
               device: torch.device, tangents: Sequence[Any], compiled: Sequence[Any]) -> tuple[Any, ...]:
    """Eager's gradients in the places of the `compiled` ones."""
    inputs = [i() if isinstance(i, weakref.ref) else i for i in held]
    why = ("an input of the compiled piece is gone" if any(i is None and w is not None for i, w in zip(inputs, held))
           else "the compiled piece changes an input of its own" if versions is False
           else "an input of the compiled piece has changed since" if versions != _versions(inputs) else None)
    state = _random_state(device)
    if not why:
        with mode, torch.enable_grad():
            outputs = piece(*inputs)
        if not torch.equal(state, _random_state(device)):
            why = "the compiled piece draws random numbers"
    if why:
        raise CaptureError(f"a gradient is to be differentiated again (create_graph=True), and {why}", where=where,
                           do="compile the whole step, or leave this piece out with torch.compiler.disable")
    given = [(outputs[position[number]], t) for number, t in enumerate(tangents) if t is not None]
    tensors = [i for i in inputs if isinstance(i, torch.Tensor)]
    wanted = [t for t, g in zip(tensors, compiled, strict=True) if g is not None]
    found = iter(torch.autograd.grad([o for o, _ in given], wanted, [t for _, t in given],
                                     create_graph=True, allow_unused=True))
    return tuple(None if g is None else next(found) for g in compiled)


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph of its own: lowering changes the one that it is given."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)
