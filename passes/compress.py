"""Keep activations packed between forward and backward, as `StepGraph.plan` says.

1. A value of the plan is packed right behind the last operator of forward that touches it, and unpacked
   right before the first of backward that does, what runs again there included.
2. All of backward reads the unpacked value, through views of it that are taken again.

Before:  a = gelu(h); y = mm(a, W); ...                                  | backward: mm(dy, a)
After:   a = gelu(h); y = mm(a, W); codes, scales = compress(a); ...     | backward:
         a' = decompress([codes, scales]); mm(dy, a')

Memory: from forward to backward the parts live in place of the value. Numbers: by its format, see
`quantization.activations`; those of masks, signs and indices as before, bit for bit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import fx

from memopt_compile.collectives import arrived
from memopt_compile.compression import COMPRESS, DECOMPRESS, layout
from memopt_compile.planning.recomputing import last_of_forward, parts, recompute
from memopt_compile.planning.rematerialization import PUT_AWAY
from memopt_compile.step_graph import StepGraph
from memopt_compile.step_pass import Numerics, StepPass


@dataclass(frozen=True)
class Compress(StepPass):
    name: ClassVar[str] = "compress"
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    def requires(self, step: StepGraph) -> str | None:
        if step.plan is None or all(form in PUT_AWAY for _, form in step.plan.packed):
            return "nothing is to be compressed"
        return None

    def run(self, step: StepGraph, costs: Any = None) -> None:
        named = {n.name: n for n in step.computing()}
        forms = {name: form for name, form in step.plan.packed if form not in PUT_AWAY}
        last = last_of_forward(step)
        behind: dict[fx.Node, fx.Node] = {}  # what has been put behind an operator, the last of it
        unpack: dict[fx.Node, Callable[[], fx.Node]] = {}
        for name, form in forms.items():
            place, value = last[named[name]], arrived(named[name])
            items = pack(step, value, form, behind.get(place, place))
            behind[place] = items[-1]
            unpack[value] = partial(unpacked, step, value, form, items)
        recompute(step, parts(step, unpack), source=unpack)


def pack(step: StepGraph, value: fx.Node, form: str, behind: fx.Node) -> list[fx.Node]:
    """The parts of `value`, made right behind a node."""
    with step.graph.inserting_after(behind):
        packed = step.call(value, COMPRESS, value, form)
    items = [packed]
    for i in range(len(packed.meta["val"])):
        with step.graph.inserting_after(items[-1]):
            items.append(step.call(value, operator.getitem, packed, i))
    return items[1:]


def unpacked(step: StepGraph, value: fx.Node, form: str, items: list[fx.Node]) -> fx.Node:
    """The value again, made where the graph inserts now."""
    return step.call(value, DECOMPRESS, items, form, *layout(value.meta["val"]))
