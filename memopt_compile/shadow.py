"""How far compressed activations move the gradients: one step run twice on copies, and compared.

Both runs are of the graph as planned, operator by operator, once as it was before anything was
compressed and once as it is after. They draw the same random numbers. The gradients of the first stay
until the second is done, so that this needs the memory of the step without a budget, and more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from .compression import COMPRESS, DECOMPRESS, layout
from .errors import NumericsError
from .quantization.named import FORMATS
from .step_graph import StepGraph

SHARE = 1e-3  # of the norm of all gradients


@dataclass(frozen=True)
class GradientError:
    """Of all gradients together the `cosine` with the exact ones and the `relative` error, the norm of
    the difference over the norm; and the largest relative error of one, of `worst`, a node's name, among those that
    have a `SHARE` of the norm: others may be rounding alone, as that of a key's bias, which no softmax sees.
    `activations` has the name of each that is kept in a lossy format, and the share of its norm that this format lost."""

    cosine: float
    relative: float
    worst: str
    worst_relative: float
    activations: tuple[tuple[str, float], ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        text = (f"cosine {self.cosine:.6f}, relative error {self.relative:.2%}, at most "
                f"{self.worst_relative:.2%} ({self.worst})")
        if self.activations:
            name, lost = max(self.activations, key=lambda each: each[1])
            text += f"; activations lose up to {lost:.2%} ({name})"
        return text


def gradient_error(exact: StepGraph, lossy: StepGraph, inputs: Sequence[Any]) -> GradientError:
    """Compare the gradients of two versions of a step for the same inputs, which stay as they are."""
    lost: dict[str, float] = {}
    expected, got = gradients(exact, inputs), gradients(lossy, inputs, lost)
    dot, squares, others, difference = 0.0, 0.0, 0.0, 0.0
    each: list[tuple[str, float, float]] = []
    for name, a in expected.items():
        a, b = a.double(), got[name].double()
        square, apart = float(a.square().sum()), float((a - b).square().sum())
        dot, squares, others = dot + float((a * b).sum()), squares + square, others + float(b.square().sum())
        difference += apart
        each.append((name, square, apart))
    worst = max(((name, (apart / square) ** 0.5) for name, square, apart in each if square > SHARE**2 * squares),
                key=lambda w: w[1], default=("", 0.0))
    norm = (squares * others) ** 0.5
    return GradientError(dot / norm if norm else 1.0, (difference / squares) ** 0.5 if squares else 0.0,
                         *worst, tuple(lost.items()))


def gradients(step: StepGraph, inputs: Sequence[Any], lost: dict[str, float] | None = None) -> dict[str, Tensor]:
    """Every gradient that the step computes, by its node's name; `lost` gets what lossy formats lose of activations."""
    found: dict[str, Tensor] = {}

    class Keeping(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if n in step.gradients:
                found[n.name] = value.clone()
            if lost is not None and n.target is COMPRESS and FORMATS[n.args[1]].error:
                lost[n.args[0].name] = _lost(self.env[n.args[0]], value, n.args[1])
            return value

    with torch.random.fork_rng(), torch.no_grad():
        Keeping(step.module).run(*(i.clone() if isinstance(i, Tensor) else i for i in inputs))
    return found


def _lost(value: Tensor, parts: list[Tensor], form: str) -> float:
    """The share of its norm that `value` loses in this format."""
    norm = torch.linalg.vector_norm(value, dtype=torch.float64)
    apart = torch.linalg.vector_norm(DECOMPRESS(parts, form, *layout(value)) - value, dtype=torch.float64)
    return float(apart / norm) if norm else 0.0


def shadowed(run: Callable[[list], Any], exact: StepGraph, lossy: StepGraph, limit: float | None,
             where: str, report: Callable[[GradientError], None]) -> Callable[[list], Any]:
    """`run`, a boxed callable, whose first call also compares the gradients.

    Raises, from that call and before anything of the step has run:
        NumericsError: the relative error is above `limit`.
    """
    waiting = True

    def compared_once(inputs: list) -> Any:
        nonlocal waiting
        if waiting:
            waiting = False
            error = gradient_error(exact, lossy, inputs)
            report(error)
            if limit is not None and not error.relative <= limit:
                raise NumericsError(
                    f"compressed activations move the gradients of this step by {error}; "
                    f"max_gradient_error is {limit:.2%}", where=where,
                    do="nothing of the step has run: use compress='int8' or None, raise "
                    "max_gradient_error, or raise memory_budget, so that less is compressed")
        return run(inputs)

    compared_once._boxed_call = True  # type: ignore[attr-defined]
    return compared_once
