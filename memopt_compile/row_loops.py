"""Loops over a batch of logits: `torch.stack([torch.logsumexp(z, -1) for z in logits])`, as TRL's losses have them.

Unrolled, such a loop reads the logits a sample at a time, and its gradient puts a matrix of all rows together for each
sample. Rows cannot be followed through that (`row_regions`). The rules, for a wide product that is read so:

1. The selections `x[0]`, .., `x[B-1]` of one tensor are a family, whose whole is x; so are slices of equal length that are all of x,
   whose whole is a view of it. Nodes that differ in nothing but which member of such families they read are one too, if they
   treat rows by themselves (`rowwise`'s operators but products): its whole is the operator on the wholes, by PyTorch's own
   rule for a batch (`torch.vmap`).
2. The members stacked, or one behind the other, are the whole. So is the sum of each member's gradient in its place and
   zeros elsewhere (`select_backward`; on Inductor a `select_scatter` into zeros), with what else is added up beside it.
3. What reads one member reads the whole in its place.

Before:  a = f(select(z, 0)); b = f(select(z, 1)); p = stack([a, b]) | dz = select_backward(da, 0) + select_backward(db, 1)
After:   p = f(z) | dz = dp

Memory: where z is computed in parts, less by all that is z's size; by itself it holds all samples at once. Numbers: the same
operators on more rows.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from .ordering import is_collective, is_random
from .row_regions import is_wide
from .rowwise import ALONG, ELEMENTWISE, PRODUCTS, SIZED
from .step_graph import OPERATOR, StepGraph, mutated_args

aten = torch.ops.aten
JOINED = {*ALONG, *SIZED, *ELEMENTWISE, "aten::select_backward", "aten::nll_loss_forward", "aten::nll_loss_backward"}
WITHOUT_DIMENSIONS = (aten.sum.default, aten.mean.default)
FILLS = (aten.new_full.default, aten.new_zeros.default, aten.zeros_like.default)
STACKED = (aten.stack.default, aten.cat.default)


def loops_joined(step: StepGraph) -> StepGraph:
    """Rules 1 to 3, in place."""
    if any(_is_looped(node) for node in step.computing()):
        _Families(step).join()
    return step


def _is_looped(node: fx.Node) -> bool:
    """Whether `node` is a wide product whose rows are selected a sample at a time, as they are or elementwise."""
    if node.target not in PRODUCTS or not is_wide(node):
        return False
    seen, stack = {node}, [node]
    while stack:
        for user in stack.pop().users:
            if _index(user) is not None:
                return True
            if user not in seen and _joins(user) and _shape(user)[-1:] == _shape(node)[-1:]:
                seen.add(user)
                stack.append(user)
    return False


def _shape(node: Any) -> tuple:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _index(node: fx.Node) -> tuple[int, int] | None:
    """How many members the family of a selection or a slice of rows has, and which of them it is."""
    if node.target not in (aten.select.int, aten.slice.Tensor) or len(node.args) > 4 or len(node.args) > 1 and node.args[1] != 0:
        return None
    shape = _shape(node.args[0])
    if not shape or len(node.args) < 3 or not all(type(number) is int for number in (*shape, *node.args[2:])):
        return None
    if node.target is aten.select.int:
        return (shape[0], node.args[2] % shape[0]) if shape[0] > 1 else None
    begin, end, _ = slice(*node.args[2:]).indices(shape[0])
    size = end - begin
    return (shape[0] // size, begin // size) if 0 < size < shape[0] and shape[0] % size == begin % size == 0 else None


def padded(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """The gradient of a member, the dimension and the member's place, if `node` is that beside zeros."""
    if node.target is aten.select_backward.default:
        member, shape, dim, index = node.args
    elif node.target is aten.select_scatter.default and node.args[0].target is aten.full.default and node.args[0].args[1] == 0:
        (shape, _), (member, dim, index) = node.args[0].args, node.args[1:]
    else:
        return None
    numbers = all(type(n) is int for n in (*shape, dim, index))
    return (member, dim % len(shape), index % shape[dim]) if numbers else None


def _joins(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, OPERATOR) and not mutated_args(node) and not is_random(node) and (
        torch.Tag.pointwise in target.tags or target._schema.name in JOINED or target in WITHOUT_DIMENSIONS)


def _holds(whole: Tensor, samples: int, member: Tensor) -> bool:
    """Whether a sample of `whole` is as `member` is, in memory too."""
    return (tuple(whole.shape) == (samples, *member.shape) and whole.dtype == member.dtype
            and all(a == b or size == 1 for a, b, size in zip(whole.stride()[1:], member.stride(), member.shape)))


def _firsts(step: StepGraph) -> dict[fx.Node, fx.Node]:
    """For each node the first one in the schedule that computes the same of the same."""
    firsts, known = dict[fx.Node, fx.Node](), dict[str, fx.Node]()
    for node in step.graph.nodes:
        firsts[node] = node
        if isinstance(node.target, OPERATOR) and not (mutated_args(node) or is_random(node) or is_collective(node)):
            how = str((node.target, *fx.map_arg((node.args, node.kwargs), firsts.__getitem__)))
            firsts[node] = known.setdefault(how, node)
    return firsts


class _Families:
    def __init__(self, step: StepGraph):
        self.step = step
        self.firsts = _firsts(step)
        self.of: dict[fx.Node, tuple[fx.Node, int]] = {}  # a member's whole, and which it is
        self.alike: dict[str, dict[int, list[fx.Node]]] = defaultdict(dict)  # by what they have in common
        self.wholes: dict[str, tuple[list[fx.Node], list[fx.Node]]] = {}  # of each family, and what makes them
        self.views: dict[tuple[fx.Node, int], fx.Node] = {}  # of what is sliced
        self.done: set[fx.Node] = set()  # what is dropped if nothing reads it

    def join(self) -> None:
        selected = [(n, found) for n in self.step.computing() if (found := _index(n)) is not None]
        for node, (samples, index) in selected:
            if (whole := self._selected(node, samples)) is not None:
                self.of[node] = whole, index
        begins, stack = set(self.of), [user for node in self.of for user in node.users]
        while stack:
            stack += self._grown(stack.pop())
        for node in list(self.step.computing()):
            if node.target in STACKED:
                self._put_together(node)
        self._add_up()
        for node in reversed(list(self.step.computing())):
            if not node.users and (node in self.of or node in self.done):
                self.step.erase(node)
            elif node in self.of and node not in begins:  # rule 3
                whole, index = self.of[node]
                with self.step.graph.inserting_before(node):
                    self.step.replace(node, self.step.call(node, aten.select.int, whole, 0, index))

    def _selected(self, node: fx.Node, samples: int) -> fx.Node | None:
        """The whole of a selection or a slice."""
        value = node.args[0]
        if node.target is aten.select.int:
            return value
        if (value, samples) not in self.views and value.meta["val"].is_contiguous():
            with self.step.graph.inserting_before(node):
                self.views[value, samples] = self.step.call(node, aten.view.default, value, [samples, *_shape(node)])
            self.done.add(self.views[value, samples])
        return self.views.get((value, samples))

    def _grown(self, node: fx.Node) -> list[fx.Node]:
        """Rule 1: what is to be looked at since `node` makes a family complete."""
        mine = [self.of[a] for a in node.all_input_nodes if a in self.of]
        which = {(_shape(whole)[0], index) for whole, index in mine}
        if node in self.of or node in self.done or len(which) != 1 or not _joins(node):
            return []
        (samples, index), = which
        key = str((node.target, *fx.map_arg((node.args, node.kwargs), self._name)))
        found = self.alike[key]
        found.setdefault(index, []).append(node)
        if len(found) < samples:
            return []
        members = [(index, node)]
        if key not in self.wholes:
            members = [(i, n) for i, alike in found.items() for n in alike]
            self.wholes[key] = self._wholes(min(n for _, n in members), samples)
        wholes, new = self.wholes[key]
        joined = []
        for i, member in members if wholes else ():
            if new and member < new[0]:  # the same computed twice: what it reads is there already
                for each in new:
                    member.prepend(each)
                    self.step.phases[each] = self.step.phase(member)
            items = {member: 0} if len(wholes) == 1 else {
                n: n.args[1] for n in member.users if n.target is operator.getitem}
            self.of.update((item, (wholes[part], i)) for item, part in items.items())
            self.done.add(member)
            joined += items
        return [user for node in joined for user in node.users]

    def _name(self, node: fx.Node) -> str:
        return f"{self.of[node][0].name}[*]" if node in self.of else self.firsts[node].name

    def _wholes(self, node: fx.Node, samples: int) -> tuple[list[fx.Node], list[fx.Node]]:
        """The results of a whole family, and what makes them in front of its first member `node`; none if PyTorch has no
        rule for it."""
        # The first of equal values: it is there wherever any of them is.
        given = {a: self.of[a][0] if a in self.of else self.firsts[a] for a in node.all_input_nodes}

        def one(*tensors: Tensor) -> Any:
            args, kwargs = fx.map_arg((node.args, node.kwargs), dict(zip(given, tensors)).__getitem__)
            return node.target(*args, **kwargs)

        values = [n.meta["val"] for n in given.values()]
        # What is elementwise of one tensor is so on all samples, where there may be no rule (`prims.convert_element_type`).
        itself = len(given) == 1 and (torch.Tag.pointwise in node.target.tags or node.target._schema.name in ELEMENTWISE)
        batched = one if itself else torch.vmap(one, in_dims=tuple(0 if a in self.of else None for a in given))
        try:
            with values[0].fake_mode:
                traced = make_fx(batched)(*values).graph
        except Exception:  # of many kinds: no rule for this operator, or not for these operands
            return [], []
        if traced.find_nodes(op="get_attr") or traced.find_nodes(op="call_function", target=aten.stack.default):
            return [], []  # without a rule it runs for one sample after the other
        made = dict(zip(traced.find_nodes(op="placeholder"), given.values()))
        with self.step.graph.inserting_before(node), values[0].fake_mode:
            for inner in traced.nodes:
                if inner.op != "call_function":
                    continue
                target, value = inner.target, inner.meta["val"]
                args, kwargs = fx.map_arg((inner.args, inner.kwargs), made.__getitem__)
                if target in FILLS or target is aten.expand.default and args[0].target is aten.full.default:
                    # Neither reads the logits for their size nor, once for all samples, needs its rows.
                    filled = args[2] if target is aten.new_full.default else args[0].args[1] if target is aten.expand.default else 0
                    target, args = aten.full.default, (list(value.shape), filled)
                    kwargs = {"dtype": value.dtype, "device": value.device}
                made[inner] = self.step.call(node, target, *args, **kwargs)
        wholes = [made[n] for n in traced.output_node().all_input_nodes]
        new = [made[n] for n in traced.nodes if n.op == "call_function"]
        self.done.update(new)
        values = node.meta["val"] if isinstance(node.meta["val"], tuple) else (node.meta["val"],)
        same = len(wholes) == len(values) and all(_holds(n.meta["val"], samples, value) for n, value in zip(wholes, values))
        return (wholes, new) if same else ([], [])

    def _put_together(self, node: fx.Node) -> None:
        """Rule 2, what is stacked or one behind the other."""
        members, *dim = node.args
        whole, _ = self.of.get(members[0], (None, 0))
        if whole is None or dim not in ([], [0]) or [self.of.get(n) for n in members] != [
                (whole, i) for i in range(_shape(whole)[0])]:
            return
        with self.step.graph.inserting_before(node):
            whole = self._compact(whole)
            if _shape(whole) != _shape(node):
                whole = self.step.call(node, aten.view.default, whole, list(_shape(node)))
        self.step.replace(node, whole)

    def _compact(self, whole: fx.Node) -> fx.Node:
        """The same without gaps, as what is put together is."""
        if whole.meta["val"].is_contiguous():
            return whole
        return self.step.call(whole, aten.clone.default, whole, memory_format=torch.contiguous_format)

    def _add_up(self) -> None:
        """Rule 2, sums of what is zero but for a member."""
        sums: dict[fx.Node, tuple[dict, tuple]] = {}  # of each whole the members that are in a sum, and its other terms
        for node in list(self.step.computing()):
            if (placed := self._placed(node)) is not None:
                sums[node] = {placed[0]: {placed[1]}}, ()
            elif node.target is aten.add.Tensor and not node.kwargs and any(a in sums for a in node.args):
                (parts, others), (more, rest) = [sums.get(a, ({}, (a,))) for a in node.args]
                if not any(parts.get(whole, set()) & which for whole, which in more.items()):
                    sums[node] = {w: parts.get(w, set()) | more.get(w, set()) for w in (*parts, *more)}, (*others, *rest)
            if node not in sums:
                continue
            self.done.add(node)
            wholes, others = sums[node]
            if all(len(which) == _shape(whole)[0] for whole, which in wholes.items()):
                total, *more = *wholes, *others
                with self.step.graph.inserting_before(node):
                    total = self._compact(total)
                    for term in more:
                        total = self.step.call(node, aten.add.Tensor, total, term)
                node.replace_all_uses_with(total)
                if node in self.step.gradients:
                    self.step.gradients.setdefault(total, self.step.gradients[node])
                del sums[node]

    def _placed(self, node: fx.Node) -> tuple[fx.Node, int] | None:
        """The whole, and which member of it, where `node` is that member in its place and zero elsewhere."""
        member, dim, index = padded(node) or (None, 0, 0)
        whole, which = self.of.get(member, (None, -1))
        same = whole is not None and dim == 0 and index == which and _shape(node) == _shape(whole)
        return (whole, which) if same else None
