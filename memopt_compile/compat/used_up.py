"""Which autograd graphs a backward that Dynamo traces has used up, and whether several can go back apart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._dynamo import output_graph
from torch.autograd.function import BackwardCFunction


def _saves(node: Any) -> bool:
    """Whether an autograd node saves tensors: a backward frees those, and uses up only such nodes."""
    return any(name.startswith("_raw_saved_") for name in dir(node)) or isinstance(node, BackwardCFunction)


def _saving(value: torch.Tensor) -> set[Any]:
    """The autograd nodes behind a fake value that save tensors."""
    return {node for node in output_graph.collect_reachable_grad_fns([(value, None)]) if _saves(node)}


@contextlib.contextmanager
def using_up(output: Any) -> Iterator[None]:
    """A backward within uses up what saves tensors, as in eager, and not also casts that micro-batches share."""
    before = set(nodes := output.autograd_grad_consumed_grad_fns)
    yield
    nodes -= {node for node in nodes - before if not _saves(node)}


def used_up(output: Any, value: torch.Tensor) -> bool:
    """Whether a backward of the frame has gone through the fake value's autograd graph, so that none can again."""
    return bool(output.autograd_grad_consumed_grad_fns & _saving(value))


def backwards_apart(results: Iterable[Any]) -> bool:
    """Whether eager could go back through these fake values one after the other, freeing for each only its own.

    So it can where their graphs share no node that saves a tensor. AOTAutograd makes one node of them, which the
    first backward uses up.
    """
    groups: list[set] = []
    for value in results:
        if getattr(value, "grad_fn", None) is None or value._is_view() and not _saving(value):
            continue  # AOTAutograd takes a view of an input outside
        joined = [group for group in groups if group & _saving(value)]
        groups = [group for group in groups if group not in joined] + [_saving(value).union(*joined)]
    return len(groups) > 1 or set() in groups
