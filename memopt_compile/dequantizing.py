"""What `memopt::dequantize` is to Inductor: its arithmetic, which fuses into what reads it.

`memopt::quantize` stays the operator that it is, a kernel of its own that goes through the tensor a
slab at a time. Inductor would write out the formula of each operand wherever it is read; in a hash
and a dynamic map every value is read several times, and such a formula grows beyond all bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from .compression import inline
from .quantization.operators import DEQUANTIZE, whole_value
from .step_graph import StepGraph


def expanded(step: StepGraph, decompositions: Mapping[Any, Any]) -> StepGraph:
    """The step, or a copy of it with arithmetic in the place of that operator."""
    if not any(node.target is DEQUANTIZE for node in step.computing()):
        return step
    step = step.copy()
    for node in list(step.computing()):
        if node.target is DEQUANTIZE:
            made = inline(step, node, partial(_value, node.args[1:]), node.args[0], decompositions)
            step.replace(node, made[0])
    return step


def _value(layout: tuple, *parts: Tensor) -> list[Tensor]:
    return [whole_value(parts, *layout)]
