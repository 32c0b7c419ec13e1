"""Whether what a step graph says of its values is what its operators make: shapes, strides and types.

Every operator runs again on fake tensors, in the graph's order. That takes as long as tracing did, so passes are
held to it by their tests and by `verify=True`, not in every compilation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from . import compat
from .errors import VerifyError
from .step_graph import StepGraph, describe, source_line


def check_metadata(step: StepGraph) -> None:
    """Raises VerifyError at the first node whose recorded value is not what its operator makes.

    Graphs with sizes that are no numbers are left out: comparing would bind them.
    """
    recorded = [node.meta.get("val") for node in step.graph.nodes]
    mode = compat.detect_fake_mode([v for v in recorded if isinstance(v, Tensor)])
    if mode is None or any(_symbolic(v) for v in recorded):
        return
    with mode, torch.no_grad():
        _Checking(step.module, garbage_collect_values=True).run(*(n.meta["val"] for n in step.placeholders))


class _Checking(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        known = n.meta.get("val")
        tensors = isinstance(made, Tensor) and isinstance(known, Tensor)
        if n.op == "call_function" and tensors and _kind(made) != _kind(known):
            raise VerifyError(f"{n.name} is said to be {describe(n)} with strides {list(known.stride())}, and its "
                              f"operator makes {made.dtype}{list(made.shape)} with strides {list(made.stride())}",
                              where=source_line(n), do="a pass that changes an operator also sets meta['val']")
        return made


def _kind(value: Tensor) -> tuple[Any, ...]:
    return value.dtype, value.device, tuple(value.shape), tuple(value.stride())


def _symbolic(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_symbolic, value))
    sizes = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
    return any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes)
