"""Which inputs a piece may write its results into: values of which it is the last reader.

Without that a sum that goes from piece to piece is there twice while a piece adds to it: the gradient of a vocabulary's
weight over parts of the logits, gradients over micro-batches, that of a residual from layer to layer.

1. A value that a piece has made, and that no later piece, nor the program, reads is given away by its last reader.
2. Equal pieces are one program: what one of its calls has to keep, none gives away.
3. No other value that is alive shares its storage. That follows from how pieces are cut (`pieces`, rule 1), and a dry run of the
   finished program proves it: `Owners`.

Memory: of what is written in place, one is alive. Numbers: the same operators on the same values.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from ..errors import MemoptError
from ..step_graph import StepGraph
from .pieces import Piece, key_of, program_reads

GIVEN = "given"  # begins the names of such inputs


def donating(step: StepGraph, parts: Sequence[Piece]) -> list[Piece]:
    """`parts` of `step`, what they give away named so."""
    last = {node: i for i, part in enumerate(parts) for node in part.inputs}
    made = {node for part in parts for node in part.outputs} - program_reads(step)
    given: dict[Any, set[int]] = {}
    for i, part in enumerate(parts):
        dies = {place for place, node in enumerate(part.inputs) if node in made and last[node] == i}
        given[part.key or i] = given.get(part.key or i, dies) & dies
    return [_renamed(part, given[part.key or i]) for i, part in enumerate(parts)]


def given_away(graph: fx.Graph) -> list[int]:
    """The numbers of such inputs of a piece."""
    return [i for i, node in enumerate(graph.find_nodes(op="placeholder")) if node.target.startswith(GIVEN)]


def _renamed(part: Piece, given: set[int]) -> Piece:
    for place in given:
        node = part.graph.find_nodes(op="placeholder")[place]
        node.target = f"{GIVEN}{place}"
        node._rename(node.target)
    return replace(part, key=part.key and key_of(part.graph)) if given else part


class Owners:
    """Results of the pieces in a dry run of their program, and its inputs."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.of: defaultdict[int, list[weakref.ref]] = defaultdict(list)  # by storage, some of them gone
        self.add(values)

    def add(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                self.of[value.untyped_storage()._cdata].append(weakref.ref(value))

    def give(self, value: Tensor) -> None:
        """Raises MemoptError if another value that is alive has the storage of `value`."""
        if any(other is not None and other is not value for other in (e() for e in self.of[value.untyped_storage()._cdata])):
            raise MemoptError("a value that a piece may write into shares its bytes with another", where="lowering='inductor'",
                              do="report it with the folder that options={'dump': ...} writes; options={'pieces': False} does without")
