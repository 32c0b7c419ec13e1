"""Fold each micro-batch's gradient into Adam's moments at once, and free it (AdamA).

AdamA (Adam Accumulation), Algorithm 2: with gradients g_1 .. g_N of the micro-batches, each
already divided by N,

    m ← β₁m + (1−β₁) Σ g_i        v ← β₂v + (1−β₂) Σ g_i²

1. ``fold(state, G, β, p)`` where G is a sum of finished gradients g_i becomes
   ``state_1 = β·state + (1−β)·g_1ᵖ`` and ``state_i = state_{i−1} + (1−β)·g_iᵖ``, each right behind
   its g_i and written to the state's own storage.
2. A gradient that enters the fold in any other way (clipped by the norm of all of them, kept from
   an earlier call, returned by the step) has to live until the update: that is refused by name.

Before:  g = g1 + g2;                  m' = fold(m, g, β, 1); update(m')
After:   m1 = β·m + (1−β)·g1; m := m1; m' = m + (1−β)·g2;     update(m')

Memory: between micro-batches no gradient is alive, and during a backward those of one layer.
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
from memopt_compile.step_graph import Phase, Role, StepGraph, mutated_args, op_name, source_line
from memopt_compile.step_pass import Numerics, StepPass

aten = torch.ops.aten
FOLD = torch.ops.memopt.fold.default


@dataclass(frozen=True)
class AccumulateInStates(StepPass):
    name: ClassVar[str] = "accumulate_in_states"
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    def run(self, step: StepGraph, costs: Any = None) -> None:
        found = [(node, *terms(step, node.args[1])) for node in _folds(step)]
        spent = {node.args[2] for node, _, _ in found}.union(*(sums for _, _, sums in found))
        for node, gradients, _ in found:
            _expand(step, node, gradients)
        for node in reversed(step.graph.nodes):
            if node in spent and not node.users and node.op != "placeholder":
                step.erase(node)

    def ensures(self, step: StepGraph) -> str | None:
        return f"{len(_folds(step))} folds are left" if _folds(step) else None


def _folds(step: StepGraph) -> list[fx.Node]:
    return step.graph.find_nodes(op="call_function", target=FOLD)


def terms(step: StepGraph, total: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The finished gradients whose sum `total` is, in the order of the schedule, and the additions.

    Raises:
        OptionError: it is more than their sum, or is needed besides.
    """
    finished, found, sums, stack = set(step.gradients), [], [], [total]
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
            if user not in sums and user.target is not FOLD:
                raise _whole(step, user)
    position = {node: i for i, node in enumerate(step.graph.nodes)}
    return sorted(found, key=position.__getitem__), sums


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
    state, _, decay, power = node.args
    decay, rest = _coefficients(step, decay)
    writes = [user for user in state.users if state in mutated_args(user)]
    in_place = state.op == "placeholder" and set(state.users) <= {node, *writes}
    value = state
    for i, gradient in enumerate(gradients):
        last = i == len(gradients) - 1
        emit = _Emitter(step, node if last else gradient, Phase.UPDATE if last else Phase.BACKWARD)
        term = emit(aten.mul.Tensor, gradient, gradient) if power == 2 else gradient
        term = emit(aten.mul.Tensor, term, rest)
        if i == 0:
            value = emit(aten.mul.Tensor, value, decay)
        value = emit(aten.add.Tensor, value, term)
        if in_place and not last:
            value = state = emit(aten.copy_.default, state, value)
    for write in writes:
        write.replace_input_with(node.args[0], state)
    step.replace(node, value)


def _coefficients(step: StepGraph, decay: fx.Node) -> tuple[Any, Any]:
    """β and 1 − β: as numbers, or where β may change as nodes ahead of every gradient."""
    if decay.target is aten.full.default:
        return decay.args[1], 1 - decay.args[1]
    ahead = next(step.computing())
    needed, stack = [], [decay]
    while stack:
        node = stack.pop()
        if node.op != "placeholder":
            needed.append(node)
            stack += node.all_input_nodes
    for node in reversed(needed):
        ahead.prepend(node)
    rest = _Emitter(step, ahead, Phase.FORWARD, before=True)(aten.rsub.Scalar, decay, 1)
    return decay, rest


class _Emitter:
    """Makes nodes with values: one behind the other behind `where`, or all of them before it."""

    def __init__(self, step: StepGraph, where: fx.Node, phase: Phase, before: bool = False) -> None:
        self.step, self.where, self.phase = step, where, phase
        self.before = before or where.target is FOLD

    def __call__(self, target: Any, *args: Any) -> fx.Node:
        graph = self.step.graph
        with (graph.inserting_before if self.before else graph.inserting_after)(self.where):
            node = graph.call_function(target, args)
        values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
        value = values[0] if target is aten.copy_.default else target(*values)
        node.meta = {**self.where.meta, "val": value}
        self.step.phases[node] = self.phase
        if not self.before:
            self.where = node
        return node
