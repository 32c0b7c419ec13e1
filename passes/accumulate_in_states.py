"""Fold each micro-batch's gradient into Adam's moments by itself (AdamA).

AdamA (Adam Accumulation), Algorithm 2: with gradients g_1 .. g_N of the micro-batches, each
already divided by N,

    m ← β₁m + (1−β₁) Σ g_i        v ← β₂v + (1−β₂) Σ g_i²

1. ``fold(state, G, β, p)`` where G is a sum of gradients g_i becomes
   ``state_1 = β·state + (1−β)·g_1ᵖ`` and ``state_i = state_{i−1} + (1−β)·g_iᵖ``.
2. A g_i is the finished gradient of a backward, or whatever is computed from those of one backward
   and no other (clipped by itself, say): each backward has one g_i in G, and none is a part of it.
3. ``fold(state, clip(G, c), β, p)`` is rule 1 with ``g_i · min(1, c/‖g_i‖)``.
4. A gradient that enters the fold in any other way (clipped with those before it, or by the norm of
   all of them, kept from an earlier call, returned by the step) has to live until the update: that
   is refused by name.

Before:  g = g1 + g2;           m' = fold(m, g, β, 1); update(m')
After:   m1 = β·m + (1−β)·g1; m' = m1 + (1−β)·g2;      update(m')

Memory: nothing needs the sum of the gradients any more, nor g1 once m1 is there. `write_back_early`
makes use of that: between micro-batches no gradient is alive, in a backward those of one layer.
Numerics: m is Adam's but for rounding. v is the sum of the squares in place of the square of the
sum: what the user asked for by ``accumulate="optimizer_states"``, and up to N times smaller.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from memopt_compile import folding  # noqa: F401  (registers the operator)
from memopt_compile.errors import OptionError
from memopt_compile.optim.low_bit import precise
from memopt_compile.step_graph import Role, StepGraph, mutated_args, op_name, source_line
from memopt_compile.step_pass import Numerics, StepPass

aten = torch.ops.aten
FOLD = torch.ops.memopt.fold.default
CLIP = torch.ops.memopt.clip.default


@dataclass(frozen=True)
class AccumulateInStates(StepPass):
    name: ClassVar[str] = "accumulate_in_states"
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    def run(self, step: StepGraph, costs: Any = None) -> None:
        backwards = _backwards(step)
        found = [(node, *terms(step, _bare(node.args[1]), backwards)) for node in _folds(step)]
        spent = {a for node, _, _ in found for a in (*_wrapped(node.args[1]), node.args[2])}.union(
            *(sums for _, _, sums in found))
        clipped: dict[Any, fx.Node] = {}
        for node, gradients, _ in found:
            _expand(step, node, gradients, clipped)
        for node in reversed(step.graph.nodes):
            if node in spent and not node.users and node.op != "placeholder":
                step.erase(node)

    def ensures(self, step: StepGraph) -> str | None:
        return f"{len(_folds(step))} folds are left" if _folds(step) else None


def _folds(step: StepGraph) -> list[fx.Node]:
    return step.graph.find_nodes(op="call_function", target=FOLD)


def _wrapped(total: fx.Node) -> list[fx.Node]:
    """`total`, and what it is without the sign that ``maximize=True`` and the clip that `max_norm`
    give it, from the outside in; with the clip its limit."""
    found = [total]
    if found[-1].target is aten.neg.default:
        found.append(found[-1].args[0])
    if found[-1].target is CLIP:
        found += reversed(found[-1].args)
    return found


def _bare(total: fx.Node) -> fx.Node:
    return _wrapped(total)[-1]


def _backwards(step: StepGraph) -> dict[fx.Node, frozenset[int]]:
    """For each node, of which backwards it has finished gradients in it (rule 2)."""
    found: dict[fx.Node, frozenset[int]] = {}
    for node in step.computing():
        found[node] = (frozenset([step.gradients[node]]) if node in step.gradients else
                       frozenset().union(*(found.get(a, ()) for a in node.all_input_nodes)))
    return found


def terms(step: StepGraph, total: fx.Node, backwards: dict[fx.Node, frozenset[int]],
          ) -> tuple[list[fx.Node], list[fx.Node]]:
    """The gradients whose sum `total` is, in the order of the schedule, and the additions.

    Raises:
        OptionError: it is more than their sum, or is needed besides.
    """
    found, sums, stack = [], [], [total]
    while stack:
        node = stack.pop()
        if len(backwards.get(node, ())) == 1:
            found.append(node)
        elif node.target is aten.add.Tensor and not node.kwargs and all(
                isinstance(a, fx.Node) and backwards.get(a) for a in node.args):
            sums.append(node)
            stack += node.args
        else:
            raise _whole(step, node)
    if len({backwards[node] for node in found}) < len(found):  # rule 2
        raise _whole(step, total)
    for node in sums:
        for user in node.users:
            if user.op == "output" or mutated_args(user):
                raise _refusal("the step leaves its gradients in .grad", node,
                               "call opt.zero_grad() behind opt.step()")
            if user not in sums and user.target is not FOLD and _bare(user) is user:
                raise _whole(step, user)
    place = {node: i for i, node in enumerate(step.graph.nodes)}
    return sorted(found, key=place.__getitem__), sums


def _whole(step: StepGraph, node: fx.Node) -> OptionError:
    """Why a gradient that is computed by `node` cannot be taken in parts."""
    if step.roles().get(node) is Role.GRADIENT:
        return _refusal("the step begins with gradients of an earlier call", node,
                        "call opt.zero_grad() behind opt.step()")
    maker = node.args[0] if node.target is operator.getitem else node
    if maker.target is aten.zero.default:
        return _refusal("the step keeps its gradients from call to call", node,
                        "call opt.zero_grad() without set_to_none=False, behind opt.step()")
    return _refusal(f"the gradients of several micro-batches are used together, by {op_name(maker)}",
                    node, "to clip, use memopt.optim.AdamW(.., max_norm=..), which clips each "
                    "parameter's gradient of each micro-batch; make other changes to the gradients of "
                    "one backward() before they are added up; or leave accumulate='gradients'")


def _refusal(what: str, node: fx.Node, do: str) -> OptionError:
    return OptionError(f"{what}: they cannot be freed one by one",
                       where=source_line(node) or "accumulate='optimizer_states'", do=do)


def _expand(step: StepGraph, node: fx.Node, gradients: list[fx.Node],
            clipped: dict[Any, fx.Node]) -> None:
    """Rules 1 and 3; `clipped` has what other folds of this step have clipped."""
    state, total, decay, power = node.args
    minus = power == 1 and total.target is aten.neg.default
    enter = aten.sub.Tensor if minus else aten.add.Tensor
    clips = [n for n in _wrapped(total) if n.target is CLIP]

    def emit(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with step.graph.inserting_before(node):
            made = step.graph.call_function(target, args, kwargs)
        made.meta = {**node.meta, "val": target(
            *(a.meta["val"] if isinstance(a, fx.Node) else a for a in args), **kwargs)}
        step.phases[made] = step.phase(node)
        return made

    if decay.target is aten.full.default:
        decay, rest = decay.args[1], 1 - decay.args[1]
    else:
        rest = emit(aten.add.Tensor, emit(aten.neg.default, decay), 1)  # Inductor takes no rsub any more
    value = emit(aten.mul.Tensor, state, decay)
    for gradient in gradients:
        for of in clips:
            if (gradient, of) not in clipped:
                # Taken apart, as Inductor wants it: tracing is over.
                dtype, wide = precise(gradient.meta["val"]), gradient
                if gradient.meta["val"].dtype != dtype:
                    wide = emit(aten._to_copy.default, gradient, dtype=dtype)
                norm = emit(aten.sqrt.default, emit(aten.sum.default, emit(aten.mul.Tensor, wide, wide)))
                share = emit(aten.clamp_max.default, emit(aten.div.Tensor, of.args[1], norm), 1.0)
                clipped[gradient, of] = emit(aten.mul.Tensor, gradient, share)
            gradient = clipped[gradient, of]
        term = emit(aten.mul.Tensor, gradient, gradient) if power == 2 else gradient
        value = emit(enter, value, emit(aten.mul.Tensor, term, rest))
    step.replace(node, value)
