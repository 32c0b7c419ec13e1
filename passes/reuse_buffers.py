"""Write results into buffers that are dead, and state into the state: what eager does by hand.

Capture makes every operator functional, so the update of a parameter holds up to three times
what eager holds. This pass, for the eager lowering only (Inductor plans buffers itself), gives
the listed pointwise operators back their in-place or ``out=`` form. Bitwise: the same kernel
runs on the same values. The numbered rules are cited in the code.

1. ``fma(a, b, c)`` becomes ``a * b + c``, which is how its own eager implementation computes it.
2. The buffer is that of the input which the result is copied back to, else that of an operand:
   first of an input, if it is overwritten later anyway.
3. The result has the buffer's geometry and fills its storage. (So may what an operator returns beside others: each has a
   storage of its own, but for `HIDDEN_VIEWS`; not what a collective has not brought yet.) Operands in the same storage have
   that geometry too, because then each element is read before it is written.
4. Nothing that lives in the buffer is touched after the operator. In an input that means up to
   the write that restores it; the result and what is made in its place are dead by then, or are
   what that write would have copied. Nor is an input written before a check that the write comes after.
5. Results that the step returns never live in an input.
6. A ``copy_`` of a value onto the place where it already is goes.
7. ``addmm`` takes the buffer of what it adds its product to, and no other; ``index_add``, ``index_put`` and
   the scatters that of what they write to. No other operand may live there.
8. `of_gradients` only: sums and updates of gradients that are complete, not what passes still have to recognize. Where a
   parameter is updated between two backwards too, which is no update by its phase, neither is written: the later one would
   take the parameter's place, and then no pass behind could put the first one there.
9. `of_backward` only: operators of backward, into what backward made and forward never reads. So a plan, which moves forward's
   values alone, finds what is left to it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from memopt_compile.checks import is_check
from memopt_compile.collectives import is_collective, readers
from memopt_compile.compat.sizes import polynomial
from memopt_compile.lowering.writing import writing_form
from memopt_compile.step_graph import (
    Phase,
    Role,
    StepGraph,
    mutated_args,
    op_name,
    same_bytes,
    storage_roots,
)
from memopt_compile.step_pass import StepPass

aten = torch.ops.aten

# Elementwise, deterministic, and with a form that writes into a given buffer.
POINTWISE = frozenset(
    [
        "abs",
        "add",
        "addcdiv",
        "addcmul",
        "ceil",
        "clamp",
        "clamp_max",
        "clamp_min",
        "copysign",
        "cos",
        "div",
        "erf",
        "exp",
        "expm1",
        "floor",
        "gelu",
        "gelu_backward",
        "hardtanh",
        "lerp",
        "leaky_relu",
        "log",
        "log1p",
        "maximum",
        "minimum",
        "mul",
        "neg",
        "pow",
        "reciprocal",
        "relu",
        "round",
        "rsqrt",
        "sigmoid",
        "sigmoid_backward",
        "sign",
        "silu",
        "silu_backward",
        "sin",
        "sqrt",
        "square",
        "sub",
        "tanh",
        "tanh_backward",
        "threshold_backward",
        "where",
        "xlogy",
    ]
)

# Those that change some of their first operand, or all of it; their functional form is a copy first.
INTO_THE_FIRST = frozenset((
    aten.addmm.default, aten.copy.default, aten.index_add.default, aten.index_copy.default, aten.index_fill.int_Scalar,
    aten.index_put.default, aten.masked_scatter.default, aten.scatter.src, aten.scatter.value,
    aten.scatter_add.default, aten.scatter_reduce.two))

HIDDEN_VIEWS = (
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
)


@dataclass(frozen=True)
class ReuseBuffers(StepPass):
    name: ClassVar[str] = "reuse_buffers"
    of_gradients: bool = False
    of_backward: bool = False

    def requires(self, step: StepGraph) -> str | None:
        hidden = next((n for n in step.computing() if n.target in HIDDEN_VIEWS), None)
        return (
            f"{op_name(hidden)} does not say what it is a view of: canonicalize first"
            if (hidden)
            else None
        )

    def run(self, step: StepGraph, costs: Any = None) -> None:
        _split_fma(step)
        buffers = _Buffers(step, self.of_backward)
        chosen = _updates(step) if self.of_gradients else None
        for node in list(step.computing()):
            if chosen is not None and node not in chosen:
                continue
            if self.of_backward and step.phase(node) is not Phase.BACKWARD:
                continue
            if node.target is aten.copy_.default:
                buffers.write_back(step, node)
            elif _is_pointwise(node) or node.target in INTO_THE_FIRST:
                buffers.reuse(node)


def _updates(step: StepGraph) -> set[fx.Node]:
    """What `of_gradients` writes (rule 8): of what a parameter or state becomes all operators, or none."""
    chosen = {n for n in step.computing() if step.phase(n) is Phase.UPDATE
              or not step.gradients.keys().isdisjoint((n, *n.all_input_nodes))}
    kept = {i.name for i in step.inputs if i.role in (Role.PARAMETER, Role.STATE)}
    for copy in [n for n in chosen if n.target is aten.copy_.default and n.args[0].name in kept]:
        chain, stack = set(), [copy]
        while stack:
            node = stack.pop()
            if node is copy or (node not in chain and node not in step.gradients and _is_pointwise(node)
                                and _geometry(node) == _geometry(copy)):
                chain.add(node)
                stack.extend(node.all_input_nodes)
        if not chain <= chosen:
            chosen -= chain
    return chosen


def _split_fma(step: StepGraph) -> None:
    """Rule 1."""
    for node in list(step.computing()):
        if op_name(node) == "fma" and len(node.args) == 3 and not node.kwargs:
            a, b, c = node.args
            values = [v.meta["val"] if isinstance(v, fx.Node) else v for v in (a, b)]
            with step.graph.inserting_before(node):
                product = step.graph.call_function(aten.mul.Tensor, (a, b))
            product.meta = {**node.meta, "val": aten.mul.Tensor(*values)}
            step.phases[product] = step.phase(node)
            node.target, node.args = aten.add.Tensor, (product, c)


def _is_pointwise(node: fx.Node) -> bool:
    return (
        getattr(node.target, "namespace", None) == "aten"
        and node.target._schema.name.removeprefix("aten::") in POINTWISE
        and isinstance(node.meta.get("val"), Tensor)
    )


def _geometry(node: fx.Node) -> tuple:
    value = node.meta["val"]
    sizes = map(polynomial, (*value.shape, *value.stride(), value.storage_offset()))
    return value.dtype, value.device, value.is_conj(), value.is_neg(), *sizes


class _Buffers:
    """Who lives where and until when, kept up to date while results move into buffers."""

    def __init__(self, step: StepGraph, of_backward: bool = False):
        self.phases = step.phases if of_backward else None
        self.position = {node: i for i, node in enumerate(step.graph.nodes)}
        self.roots = storage_roots(step.graph)
        self.returned = set(step.graph.output_node().all_input_nodes)
        self.checks = [i for node, i in self.position.items() if is_check(node)]
        self.members: dict[fx.Node, set[fx.Node]] = {}
        self.writes: dict[fx.Node, list[fx.Node]] = {}
        self.latest: dict[fx.Node, fx.Node] = {}  # by owner, the node that shows what is in it now
        for node, roots in self.roots.items():
            for root in roots:
                self.members.setdefault(root, set()).add(node)
            for root in {r for a in mutated_args(node) for r in self.roots[a]}:
                self.writes.setdefault(root, []).append(node)

    def reuse(self, node: fx.Node) -> None:
        """Let `node` write into the first buffer that may take its result."""
        if self.roots[node] != {node}:
            return  # it does already
        for buffer in self._candidates(node):
            if self._may_take(buffer, node) and (form := writing_form(node, buffer)):
                node.target, node.args, node.kwargs = form
                (root,) = self.roots[buffer]
                self._move(node, root)
                self.latest[root] = node
                return

    def write_back(self, step: StepGraph, copy: fx.Node) -> None:
        target, source = copy.args[:2]
        if len(self.roots[target]) != 1:
            return
        (root,) = self.roots[target]
        if source is target:  # what is there by now
            self.latest[root] = copy
            return
        target = self._now(target)
        if self.roots[source] == {root} and _geometry(source) == _geometry(target):  # rule 6
            self.writes[root].remove(copy)
            self.members[root].discard(copy)
            if copy in self.returned:  # the input itself is the result, as before
                self.returned = self.returned - {copy} | {source}
            step.replace(copy, source)
            return
        copy.args = (target, *copy.args[1:])
        self.latest[root] = copy

    def _candidates(self, node: fx.Node) -> list[fx.Node]:
        """Rules 2 and 7."""
        if node.target in INTO_THE_FIRST:
            others: set[fx.Node] = set()
            fx.node.map_arg((node.args[1:], node.kwargs), lambda other: others.update(self.roots[other]))
            return [] if self.roots[node.args[0]] & others else [node.args[0]]
        operands = [a for a in node.all_input_nodes if isinstance(a.meta.get("val"), Tensor)]
        # State first: between the folds of micro-batches it stays where it is, and gradients die.
        operands.sort(key=lambda o: all(r.op != "placeholder" for r in self.roots[o]))
        ends = [
            self._now(u.args[0])
            for u in node.users
            if u.target is aten.copy_.default and u.args[1] is node
        ]
        places = {r for e in ends for r in self.roots[e]}
        return (
            [o for o in operands if self.roots[o] & places]
            + ends
            + [o for o in operands if not self.roots[o] & places]
        )

    def _may_take(self, buffer: fx.Node, node: fx.Node) -> bool:
        if len(self.roots[buffer]) != 1:
            return False
        (root,) = self.roots[buffer]
        if root.op == "get_attr" or root.target is operator.getitem and is_collective(root.args[0]):
            return False
        if root.op == "placeholder" and node in self.writes:
            return False  # what is written there later is not what the input is to hold
        if self.phases and any(self.phases.get(each) is not Phase.BACKWARD
                               for member in self.members[root] for each in (member, *readers(member))):
            return False  # rule 9
        same = (a for a in (buffer, *node.all_input_nodes) if root in self.roots[a])
        if any(_geometry(a) != _geometry(node) for a in same) or not same_bytes(buffer, node):
            return False  # rule 3
        now = self.position[node]
        if root.op != "placeholder":
            return not any(t > now for t in self._touches(self.members[root]))  # rule 4
        later = [w for w in self.writes.get(root, []) if self.position[w] > now]
        if not later or self.members[node] & self.returned:  # rule 5
            return False
        restore = later[0]
        if restore.target is not aten.copy_.default or _geometry(restore) != _geometry(node):
            return False
        if root in self.roots[restore.args[1]]:
            return False
        if any(now < check < self.position[restore] for check in self.checks):
            return False
        until = self.position[restore]
        if restore.args[1] is node:
            until = self.position[later[1]] if len(later) > 1 else len(self.position)
        touches = self._touches(self.members[root])
        return not any(now < t < self.position[restore] for t in touches) and all(
            t < until for t in self._touches(self.members[node])
        )

    def _now(self, value: fx.Node) -> fx.Node:
        """The node that shows what is in the place of `value` now."""
        latest = next((self.latest[r] for r in self.roots[value] if r in self.latest), value)
        return latest if _geometry(latest) == _geometry(value) else value

    def _touches(self, members: set[fx.Node]) -> set[int]:
        return {self.position[t] for m in members for t in (m, *readers(m))}

    def _move(self, node: fx.Node, root: fx.Node) -> None:
        for member in self.members.pop(node):
            self.roots[member] = self.roots[member] - {node} | {root}
            self.members[root].add(member)
        if node in self.writes:
            self.writes.setdefault(root, []).extend(self.writes.pop(node))
