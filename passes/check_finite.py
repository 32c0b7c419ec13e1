"""Look before the first write whether everything that was packed in few bits is finite.

1. Behind each packing in a lossy format the sum of its scales is added to a running total: a scale is
   not finite if an element of its group is not.
2. Behind the last of them `require_finite` reads the total. Up to there nothing that stays may be lost: of
   inputs that are written before (statistics of a normalization) a copy is kept until then.
3. Where those are more than `LARGEST` (the states that AdamA writes in every micro-batch), the step
   cannot be taken back: nothing is looked for. Nor where ranks call each other: one would begin anew by
   itself, while the others wait for what it has called already.

Before:  a = ..; codes, scales = compress(a); y = ..                              | backward: ..
After:   a = ..; codes, scales = compress(a); n = add(total, sum(scales)); y = ..
         require_finite(n, [], [])                                                | backward: ..

Memory: a number for each packing, and the copies of rule 2. Numbers: those of the step as it is, or, if
it is taken back, of the exact one.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from memopt_compile.compression import COMPRESS
from memopt_compile.finiteness import REQUIRE_FINITE
from memopt_compile.options import format_bytes
from memopt_compile.quantization.named import FORMATS
from memopt_compile.step_graph import StepGraph, is_collective, mutated_args, nbytes, storage_roots
from memopt_compile.step_pass import StepPass

aten = torch.ops.aten
LARGEST = 2**20  # bytes


@dataclass(frozen=True)
class CheckFinite(StepPass):
    name: ClassVar[str] = "check_finite"

    def requires(self, step: StepGraph) -> str | None:
        if not scales(step):
            return "nothing is packed in a lossy format"
        if any(map(is_collective, step.computing())):
            return "a step with collectives cannot be taken back by one rank alone"
        written = written_early(step)
        size = sum(nbytes(given.meta["val"]) for given in written)
        if size > LARGEST:
            return (f"{format_bytes(size)} of the step's inputs are written before its last activation "
                    "is packed: it could not be taken back")
        if any(isinstance(now := write.meta["val"], Tensor) and now.shape != given.meta["val"].shape
               for given, write in written.items()):
            return "a part of an input is written before the last activation is packed"
        return None

    def run(self, step: StepGraph, costs: Any = None) -> None:
        written, looked_at = written_early(step), scales(step)
        with step.graph.inserting_before(next(iter(step.computing()))):
            saved = [step.call(looked_at[0], aten.clone.default, given) for given in written]
        total = None
        for each in looked_at:  # rule 1
            with step.graph.inserting_after(each):
                here = step.call(each, aten.sum.dim_IntList, each, None, dtype=torch.float32)
            with step.graph.inserting_after(here):
                total = step.call(each, aten.add.Tensor, total, here) if total else here
        shown = []
        for given, write in written.items():
            if not isinstance(write.meta["val"], Tensor):  # it writes in place and returns nothing
                with step.graph.inserting_after(write):
                    write = step.call(write, aten.copy_.default, given, given)
            shown.append(write)
        with step.graph.inserting_after(total):  # rule 2
            step.call(looked_at[-1], REQUIRE_FINITE, total, shown, saved)


def scales(step: StepGraph) -> list[fx.Node]:
    """Of every packing in a lossy format the part that is not finite if an element is not, in
    schedule order."""
    return [n for n in step.computing() if n.target is operator.getitem and n.args[0].target is COMPRESS
            and (form := FORMATS[n.args[0].args[1]]).error and n.args[1] == form.scales]


def written_early(step: StepGraph) -> dict[fx.Node, fx.Node]:
    """The inputs that are written before the last of these is there, each with its last write."""
    roots, last = storage_roots(step.graph), scales(step)[-1]
    found: dict[fx.Node, fx.Node] = {}
    for node in step.computing():
        if node is last:
            break
        found.update((root, node) for a in mutated_args(node) for root in roots[a]
                     if root.op == "placeholder")
    return found
