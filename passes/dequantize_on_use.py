"""Decode a low-precision parameter where it is used, instead of keeping it decoded.

Traced, a parameter is decoded where forward first reads it, and backward reads the same value: a
copy in full precision of every parameter would live from forward to backward. This pass gives
each reader a decoding of its own:

1. A reader of a decoded parameter, through views or not, gets it decoded right before itself, and
   the views taken again.
2. In forward and backward a reader that wants none but what the one before it had, in the same
   phase, takes that. So what one operator needs is all that is decoded there. The update, which is
   of one parameter at a time, decodes it once.
3. The codes must still be there: what is read after they have been overwritten, and what the step
   returns, stays as it is.

Before:  W = dequantize(w); y = mm(x, W.t()); ...    | backward: dx = mm(dy, W)
After:   W = dequantize(w); y = mm(x, W.t()); ...    | backward: W' = dequantize(w); dx = mm(dy, W')

Memory: no parameter is held in full precision but by the operator that reads it. Numbers: bit for
bit the same codes decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import fx

from memopt_compile.quantization.operators import DEQUANTIZE
from memopt_compile.step_graph import (
    Phase,
    StepGraph,
    aliased_args,
    mutated_args,
    storage_roots,
)
from memopt_compile.step_pass import StepPass


@dataclass(frozen=True)
class DequantizeOnUse(StepPass):
    name: ClassVar[str] = "dequantize_on_use"

    def requires(self, step: StepGraph) -> str | None:
        if any(node.target is DEQUANTIZE for node in step.computing()):
            return None
        return "no parameter is in low precision"

    def run(self, step: StepGraph, costs: Any = None) -> None:
        decoded = _decoded(step)
        held = _Held(step)
        for reader, wanted in list(_readers(step, decoded)):
            held.give(reader, wanted, decoded)
        for node in reversed(decoded):
            if not node.users:
                step.erase(node)

    def ensures(self, step: StepGraph) -> str | None:
        decoded = _decoded(step)
        phases: dict[fx.Node, set[Phase]] = {}
        for reader, wanted in _readers(step, decoded):
            for value in wanted:
                phases.setdefault(decoded[value], set()).add(step.phase(reader))
        shared = [node.name for node, of in phases.items() if len(of) > 1]
        return f"{', '.join(shared[:5])} live from one phase to another" if shared else None


def _decoded(step: StepGraph) -> dict[fx.Node, fx.Node]:
    """Each decoded parameter and each view of one, with the operator that decodes it."""
    found: dict[fx.Node, fx.Node] = {}
    for node in step.computing():
        if node.target is DEQUANTIZE:
            found[node] = node
        elif not mutated_args(node):
            found.update((node, found[a]) for a in aliased_args(node) if a in found)
    return found


def _readers(step: StepGraph,
             decoded: dict[fx.Node, fx.Node]) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Each operator that reads decoded parameters, with those whose codes are still there (rule 3)."""
    roots = storage_roots(step.graph)
    overwritten: set[fx.Node] = set()
    for reader in step.computing():
        if reader not in decoded:
            wanted = [a for a in reader.all_input_nodes if a in decoded and not any(
                roots[part] & overwritten for part in decoded[a].all_input_nodes)]
            if wanted:
                yield reader, wanted
        overwritten |= {root for a in mutated_args(reader) for root in roots[a]}


@dataclass
class _Held:
    """What has been decoded for the last reader: `copies` by the node that they stand for."""

    step: StepGraph
    phase: Phase | None = None
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def give(self, reader: fx.Node, wanted: list[fx.Node], decoded: dict[fx.Node, fx.Node]) -> None:
        """Let `reader` read copies of its own of the values `wanted`, or those of the last (rule 2)."""
        phase, sources = self.step.phase(reader), {decoded[a] for a in wanted}
        more = phase is not Phase.UPDATE and not sources <= {decoded[n] for n in self.copies}
        if more or phase is not self.phase:
            self.phase, self.copies = phase, {}
        for value in wanted:
            reader.replace_input_with(value, self._copy(value, reader, decoded))

    def _copy(self, value: fx.Node, reader: fx.Node, decoded: dict[fx.Node, fx.Node]) -> fx.Node:
        if value in self.copies:
            return self.copies[value]
        of = {a: self._copy(a, reader, decoded) for a in value.all_input_nodes if a in decoded}
        with self.step.graph.inserting_before(reader):
            copy = self.step.graph.node_copy(value, lambda n: of.get(n, n))
        self.step.phases[copy] = self.phase
        self.copies[value] = copy
        return copy
