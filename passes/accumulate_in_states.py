"""Fold each micro-batch's gradient into Adam's moments by itself (AdamA).

AdamA (Adam Accumulation), Algorithm 2: with gradients g_1 .. g_N of the micro-batches, each
already divided by N,

    m ← β₁m + (1−β₁) Σ g_i        v ← β₂v + (1−β₂) Σ g_i²

1. ``fold(state, G, β, p)`` where G is a sum of finished gradients g_i becomes
   ``state_1 = β·state + (1−β)·g_1ᵖ`` and ``state_i = state_{i−1} + (1−β)·g_iᵖ``.
2. A gradient that enters the fold in any other way (clipped by the norm of all of them, kept from
   an earlier call, returned by the step) has to live until the update: that is refused by name.

Before:  g = g1 + g2;           m' = fold(m, g, β, 1); update(m')
After:   m1 = β·m + (1−β)·g1; m' = m1 + (1−β)·g2;      update(m')

Memory: nothing needs the sum of the gradients any more, nor g1 once m1 is there. `write_back_early`
makes use of that: between micro-batches no gradient is alive, in a backward those of one layer.
Numerics: m is Adam's but for rounding. v is the sum of the squares in place of the square of the
sum: what the user asked for by ``accumulate="optimizer_states"``, and up to N times smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from memopt_compile import folding  # noqa: F401  (registers the operator)
from memopt_compile.errors import OptionError
from memopt_compile.step_graph import Role, StepGraph, mutated_args, op_name, source_line
from memopt_compile.step_pass import Numerics, StepPass

aten = torch.ops.aten
FOLD = torch.ops.memopt.fold.default


@dataclass(frozen=True)
class AccumulateInStates(StepPass):
    name: ClassVar[str] = "accumulate_in_states"
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    def run(self, step: StepGraph, costs: Any = None) -> None:
        found = [(node, *terms(step, _unsigned(node.args[1]))) for node in _folds(step)]
        spent = {a for node, _, _ in found for a in node.args[1:3]}.union(
            *(sums for _, _, sums in found))
        for node, gradients, _ in found:
            _expand(step, node, gradients)
        for node in reversed(step.graph.nodes):
            if node in spent and not node.users and node.op != "placeholder":
                step.erase(node)

    def ensures(self, step: StepGraph) -> str | None:
        return f"{len(_folds(step))} folds are left" if _folds(step) else None


def _folds(step: StepGraph) -> list[fx.Node]:
    return step.graph.find_nodes(op="call_function", target=FOLD)


def _unsigned(total: fx.Node) -> fx.Node:
    """`total` without the sign that ``maximize=True`` gives it."""
    return total.args[0] if total.target is aten.neg.default else total


def terms(step: StepGraph, total: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The finished gradients whose sum `total` is, in the order of the schedule, and the additions.

    Raises:
        OptionError: it is more than their sum, or is needed besides.
    """
    finished = {gradient: i for i, gradient in enumerate(step.gradients)}
    found, sums, stack = [], [], [total]
    while stack:
        node = stack.pop()
        if node in finished:
            found.append(node)
        elif node.target is aten.add.Tensor and not node.kwargs and all(
                isinstance(a, fx.Node) for a in node.args):
            sums.append(node)
            stack += node.args
        else:
            raise _whole(step, node)
    for node in sums:
        for user in node.users:
            if user.op == "output" or mutated_args(user):
                raise _refusal("the step leaves its gradients in .grad", node,
                               "call opt.zero_grad() behind opt.step()")
            if user not in sums and user.target is not FOLD and _unsigned(user) is user:
                raise _whole(step, user)
    return sorted(found, key=finished.__getitem__), sums


def _whole(step: StepGraph, node: fx.Node) -> OptionError:
    """Why a gradient that is computed by `node` cannot be taken in parts."""
    if step.roles().get(node) is Role.GRADIENT:
        return _refusal("the step begins with gradients of an earlier call", node,
                        "call opt.zero_grad() behind opt.step()")
    return _refusal(f"the gradients of all micro-batches are used together, by {op_name(node)}", node,
                    "clip, unscale or change gradients per micro-batch before backward() adds them "
                    "up, or leave accumulate='gradients'")


def _refusal(what: str, node: fx.Node, do: str) -> OptionError:
    return OptionError(f"{what}: they cannot be freed one by one",
                       where=source_line(node) or "accumulate='optimizer_states'", do=do)


def _expand(step: StepGraph, node: fx.Node, gradients: list[fx.Node]) -> None:
    """Rule 1."""
    state, total, decay, power = node.args
    enter = aten.sub.Tensor if power == 1 and _unsigned(total) is not total else aten.add.Tensor

    def emit(target: Any, *args: Any) -> fx.Node:
        with step.graph.inserting_before(node):
            made = step.graph.call_function(target, args)
        made.meta = {**node.meta, "val": target(
            *(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))}
        step.phases[made] = step.phase(node)
        return made

    if decay.target is aten.full.default:
        decay, rest = decay.args[1], 1 - decay.args[1]
    else:
        rest = emit(aten.rsub.Scalar, decay, 1)
    value = emit(aten.mul.Tensor, state, decay)
    for gradient in gradients:
        term = emit(aten.mul.Tensor, gradient, gradient) if power == 2 else gradient
        value = emit(enter, value, emit(aten.mul.Tensor, term, rest))
    step.replace(node, value)
