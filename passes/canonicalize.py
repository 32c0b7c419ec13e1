"""Take out of a captured step what eager never did: copies, buffers and views made by tracing.

Bitwise, and the predicted peak does not rise, but for the few bytes of 0-dim tensors that rule 7
shares. The rules, cited in the code:

1. A node that nobody reads goes, unless it writes, draws random numbers or checks something. So does the wait for a
   gather, and with it the gather: of a parameter that is asked for its type (``layer.weight.dtype``).
2. Views that do not say so become views that do: ``_unsafe_view`` a ``view``, the items of
   ``split`` ``slice``, those of ``unbind`` ``select``. Who shares storage is then in the graph.
3. A view with the geometry of a value it is a view of is that value (``detach``, ``t(t(x))``;
   not the result of a collective that is waited for).
4. A copy (``clone``, ``_to_copy`` or functional ``copy``) with the geometry of its source is its
   source, if both can share a storage: see `_Storages.may_share`.
5. Any other functional ``copy`` becomes a ``clone`` or ``_to_copy`` of its source, or the source
   itself if all that follows is a scatter of its values; the buffer that only lent its layout
   falls to rule 1.
6. ``copy_(p, p)`` goes.
7. Equal views, and equal computations on 0-dim tensors, are made once. Larger values are not
   shared, but by rule 13: that would keep them alive for longer.
8. ``_foreach_mul`` becomes one ``mul`` a tensor, so that each result can die by itself, and so do the others that
   scale, clamp and average (`clip_grad_norm_`, `clip_grad_value_`, means of parameters).
9. A ``sum`` that keeps the dimensions it sums over for nothing but a ``view`` without them drops
   them itself (the gradient of a bias: micro-batches then add up the same values in every one).
10. A ``slice_scatter`` of a whole tensor (``x[:].copy_(y)``, traced) is a ``copy``, for rules 4 and 5; so is ``cat`` of one tensor
    (a loop that happens to have one piece, and its gradient).
11. Backward of a batch normalization by the batch's own statistics is given no running ones: it does not read them, and
    would keep their new values from forward on.
12. A product with ones is a copy of its other factor, for rule 4: so is the gradient of what is summed up to the loss.
    Not where gradients of several backwards, or folds of them, have to be told apart by whose they are.
13. Equal casts of one value are made once while the first lives on anyway: autocast casts what three layers read three
    times, and backward would keep all three.

What the step returns keeps owning a storage of its own: the user may write into a gradient.
What a model returns does not become a view either, since autograd forbids some writes into views:
rules 2 and 4 leave it alone.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from memopt_compile.collectives import GATHER, is_wait, launch_of
from memopt_compile.compat.sizes import polynomial
from memopt_compile.step_graph import (
    StepGraph,
    aliased_args,
    mutated_args,
    same_bytes,
    storage_roots,
    viewed,
)
from memopt_compile.step_pass import StepPass

aten = torch.ops.aten

COPIES = (aten.clone.default, aten._to_copy.default, aten.copy.default)
SPLITS = (
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
)
SCATTERS = (aten.slice_scatter.default, aten.select_scatter.default, aten.diagonal_scatter.default)
FOREACH = {  # for one tensor, where the last operand is a tensor, and where it is a number
    "aten::_foreach_mul": (aten.mul.Tensor, aten.mul.Tensor),
    "aten::_foreach_div": (aten.div.Tensor, aten.div.Tensor),
    "aten::_foreach_add": (aten.add.Tensor, aten.add.Tensor),
    "aten::_foreach_sub": (aten.sub.Tensor, aten.sub.Tensor),
    "aten::_foreach_lerp": (aten.lerp.Tensor, aten.lerp.Scalar),
    "aten::_foreach_clamp_min": (aten.clamp_min.Tensor, aten.clamp_min.default),
    "aten::_foreach_clamp_max": (aten.clamp_max.Tensor, aten.clamp_max.default),
}
BATCH_NORM_BACKWARD = {  # what says whether the statistics are the batch's: cuDNN's always are
    "aten::native_batch_norm_backward": "train", "aten::batch_norm_backward": "update", "aten::cudnn_batch_norm_backward": None}


@dataclass(frozen=True)
class Canonicalize(StepPass):
    name: ClassVar[str] = "canonicalize"

    def run(self, step: StepGraph, costs: Any = None) -> None:
        remove_dead_code(step)
        returned = _differentiable_results(step)
        alone = len(set(step.gradients.values())) < 2 and all(_name(n) != "memopt::fold" for n in step.computing())
        for node in list(step.computing()):
            if node.target is aten._unsafe_view.default and node not in returned:  # rule 2
                node.target = aten.view.default
            elif node.target in SPLITS or node.target is aten.unbind.int:
                _take_apart(step, node)
            elif _name(node) in FOREACH:
                _unbundle(node)
            elif node.target is aten.sum.dim_IntList:
                _drop_summed(step, node)
            elif node.target is aten.slice_scatter.default and _is_whole(node):  # rule 10
                node.target, node.args, node.kwargs = aten.copy.default, node.args[:2], {}
            elif node.target is aten.cat.default and len(node.args[0]) == 1 and _geometry(node) == _geometry(node.args[0][0]):
                node.target, node.args, node.kwargs = aten.clone.default, (node.args[0][0],), {}  # rule 10
            elif _name(node) in BATCH_NORM_BACKWARD:
                _drop_running_statistics(node)
            elif alone and node.target is aten.mul.Tensor and (other := _times_one(node)) is not None:  # rule 12
                node.target, node.args = aten.clone.default, (other,)
        _simplify(step)
        remove_dead_code(step)

    def ensures(self, step: StepGraph) -> str | None:
        dead = next((n for n in step.computing() if _is_dead(n)), None)
        return f"{dead.name} is dead code" if dead else None


def _differentiable_results(step: StepGraph) -> set[fx.Node]:
    return set(step.graph.output_node().all_input_nodes) if step.kind == "model" else set()


def remove_dead_code(step: StepGraph) -> None:
    """Rule 1."""
    for node in reversed(list(step.computing())):
        if _is_dead(node):
            step.erase(node)


def _is_dead(node: fx.Node) -> bool:
    return not node.users and (not node.is_impure() or is_wait(node) and launch_of(node).target is GATHER)


def _take_apart(step: StepGraph, node: fx.Node) -> None:
    """Rule 2."""
    source, dim = node.args[0], _dim(node)
    if node.target is aten.unbind.int:
        for item in list(node.users):
            item.target, item.args = aten.select.int, (source, dim, item.args[1])
        return
    ends = list(itertools.accumulate(v.shape[dim] for v in node.meta["val"]))
    if all(isinstance(end, int) for end in ends):
        for item in list(node.users):
            i = item.args[1]
            item.target, item.args = (
                aten.slice.Tensor,
                (source, dim, ends[i - 1] if i else 0, ends[i]),
            )


def _dim(node: fx.Node) -> int:
    position = 1 if node.target is aten.unbind.int else 2
    return node.kwargs.get("dim", node.args[position] if len(node.args) > position else 0)


def _name(node: fx.Node) -> str | None:
    return getattr(getattr(node.target, "_schema", None), "name", None)


def _drop_running_statistics(node: fx.Node) -> None:
    """Rule 11."""
    names = [argument.name for argument in node.target._schema.arguments]
    given = dict(zip(names, node.args)) | node.kwargs
    if given.get(BATCH_NORM_BACKWARD[_name(node)], True) is True:
        given |= {"running_mean": None, "running_var": None}
        node.args, node.kwargs = tuple(given[name] for name in names), {}


def _times_one(product: fx.Node) -> fx.Node | None:
    """The factor of which `product` has type, sizes and strides, if all elements of the other one are 1."""
    for one, other in (product.args, product.args[::-1]):
        while isinstance(one, fx.Node) and one.target in (aten.expand.default, aten.view.default):
            one = one.args[0]
        if (isinstance(other, fx.Node) and isinstance(one, fx.Node) and one.target is aten.full.default
                and one.args[1] == 1 and _geometry(other) == _geometry(product) is not None):
            return other
    return None


def _unbundle(node: fx.Node) -> None:
    """Rule 8."""
    for item in list(node.users):
        args = tuple(each[item.args[1]] if isinstance(each, (list, tuple)) else each for each in node.args)
        tensor = isinstance(args[-1], fx.Node) and isinstance(args[-1].meta["val"], Tensor)
        item.target, item.args, item.kwargs = FOREACH[_name(node)][not tensor], args, node.kwargs


def _drop_summed(step: StepGraph, node: fx.Node) -> None:
    """Rule 9."""
    view = next(iter(node.users), None)
    if node.args[2:] != (True,) or len(node.users) != 1 or view.target is not aten.view.default:
        return
    summed = {d % node.meta["val"].dim() for d in node.args[1]}
    left = [n for d, n in enumerate(node.meta["val"].shape) if d not in summed]
    if summed and str(left) == str(list(view.meta["val"].shape)):
        node.args = node.args[:2]
        node.meta["val"] = view.meta["val"]
        step.replace(view, node)


def _is_whole(scatter: fx.Node) -> bool:
    base, source = (a.meta["val"] for a in scatter.args[:2])
    return str(base.shape) == str(source.shape) and not scatter.args[5:] and not scatter.kwargs


def _simplify(step: StepGraph) -> None:
    """Rules 3 to 7 and 13, from the first node to the last: operands are simple before their users."""
    storages = _Storages(step.graph)
    results = _differentiable_results(step)
    made: dict[Any, fx.Node] = {}
    for node in list(step.computing()):
        if node.target is operator.getitem or not isinstance(node.meta.get("val"), Tensor):
            continue
        if (same := _viewed(node, storages)) is not None:
            storages.merge(node, same)
            step.replace(node, same)
        elif node.target in COPIES:
            _simplify_copy(step, node, storages, node in results)
            if node.users and node.target is aten._to_copy.default and node not in step.gradients:
                key = _key(node.args), _key(node.kwargs), node.meta.get("recompute"), node.meta.get("ac_graph_id")  # rule 13
                if key in made and storages.lives_on(made[key], node):
                    storages.merge(node, made[key])
                    step.replace(node, made[key])
                else:
                    made[key] = node
        elif node.target is aten.copy_.default:
            target, source = node.args[:2]  # rule 6
            if storages.same_place(target, source) and node not in storages.returned:
                storages.merge(node, target)
                step.replace(node, target)
        elif _is_shareable(node) and node not in storages.returned:
            key = node.target, _key(node.args), _key(node.kwargs)  # rule 7
            if key in made:
                storages.merge(node, made[key])
                step.replace(node, made[key])
            else:
                made[key] = node


def _viewed(node: fx.Node, storages: _Storages) -> fx.Node | None:
    """Rule 3: the earliest value that `node` is an equal view of."""
    found = None
    for at in viewed(node):
        # An object that the caller holds twice differs from two that share a storage.
        clash = node in storages.returned and (at.op == "placeholder" or at in storages.returned)
        if _geometry(at, offset=True) == _geometry(node, offset=True) and not clash:
            found = at
    return found


def _simplify_copy(step: StepGraph, node: fx.Node, storages: _Storages, no_view: bool) -> None:
    source = node.args[1] if node.target is aten.copy.default else node.args[0]
    shares = not (no_view and aliased_args(source)) and storages.may_share(node, source)
    if shares and _geometry(source) == _geometry(node):  # rule 4
        storages.merge(node, source)
        step.replace(node, source)
    elif node.target is aten.copy.default:  # rule 5
        if list(node.users) == [node.next] and node.next.target in SCATTERS and (
                node.next.args[0] is not node and _values(source) == _values(node)):
            storages.merge(node, source)
            step.replace(node, source)
            return
        for target, kwargs in _plain_copies(source.meta["val"], node.meta["val"]):
            made = target(source.meta["val"], **kwargs)
            if _describe(made) == _describe(node.meta["val"]):
                node.target, node.args, node.kwargs = target, (source,), kwargs
                return


def _values(node: fx.Node) -> tuple:
    return node.meta["val"].dtype, node.meta["val"].device, str(tuple(node.meta["val"].shape))


def _plain_copies(source: Tensor, wanted: Tensor) -> list[tuple[Any, dict[str, Any]]]:
    target, kwargs = aten.clone.default, {}
    if source.dtype != wanted.dtype or source.device != wanted.device:
        target, kwargs = aten._to_copy.default, {"dtype": wanted.dtype, "device": wanted.device}
        kwargs = {k: v for k, v in kwargs.items() if v != getattr(source, k)}
    formats = [torch.contiguous_format]
    formats += {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(wanted.dim(), [])
    return [(target, kwargs)] + [(target, {**kwargs, "memory_format": f}) for f in formats]


def _is_shareable(node: fx.Node) -> bool:
    values = [node.meta["val"], *(a.meta.get("val") for a in node.all_input_nodes)]
    scalars = all(not isinstance(v, Tensor) or v.dim() == 0 for v in values)
    return (scalars or bool(aliased_args(node))) and not mutated_args(node) and not node.is_impure()


def _key(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_key(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _key(v)) for k, v in sorted(value.items()))
    return type(value), repr(value)  # 1, 1.0 and True are equal, and so are 0.0 and -0.0


def _describe(value: Tensor) -> tuple:
    return value.dtype, value.device, *map(polynomial, (*value.shape, *value.stride()))


def _geometry(node: fx.Node, offset: bool = False) -> tuple | None:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    place = (polynomial(value.storage_offset()),) if offset else ()
    return *_describe(value), value.is_conj(), value.is_neg(), *place


class _Storages:
    """Who shares which storage, kept up to date while nodes are replaced."""

    def __init__(self, graph: fx.Graph):
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.roots = storage_roots(graph)
        self.returned = set(graph.output_node().all_input_nodes)
        self.members: dict[fx.Node, set[fx.Node]] = {}
        self.writers: dict[fx.Node, list[fx.Node]] = {}
        for node, roots in self.roots.items():
            for root in roots:
                self.members.setdefault(root, set()).add(node)
        for node in graph.nodes:
            for root in {r for a in mutated_args(node) for r in self.roots[a]}:
                self.writers.setdefault(root, []).append(node)

    def merge(self, node: fx.Node, by: fx.Node) -> None:
        """`node` is about to be replaced by `by`."""
        for old in self.roots[node] - self.roots[by]:
            for member in self.members.pop(old):
                self.roots[member] = self.roots[member] - {old} | self.roots[by]
                for root in self.roots[by]:
                    self.members[root].add(member)
        for root in self.roots[by]:
            self.members[root].discard(node)
        if node in self.returned:
            self.returned = self.returned - {node} | {by}

    def same_place(self, a: fx.Node, b: Any) -> bool:
        return (
            isinstance(b, fx.Node)
            and self.roots[a] == self.roots[b]
            and _geometry(a, offset=True) == _geometry(b, offset=True) is not None
        )

    def lives_on(self, first: fx.Node, copy: fx.Node) -> bool:
        """Whether the equal `first` is alive behind `copy` in any case, and nobody writes into them or between them."""
        reads = {user for alias in self.members[first] for user in alias.users}
        return not ({first, copy} & self.writers.keys() or self.members[copy] & self.returned or any(
            self.position[first] < self.position[write] < self.position[copy]
            for root in self.roots[first.args[0]] for write in self.writers.get(root, ()))
        ) and any(self.position[copy] < self.position[read] for read in reads)

    def may_share(self, copy: fx.Node, source: fx.Node) -> bool:
        """Whether nobody can tell `copy` from `source`, and sharing keeps no more bytes alive."""
        if len(self.roots[source]) != 1 or copy in self.writers:
            return False
        (root,) = self.roots[source]
        aliases = self.members[copy]
        given = root.op in ("placeholder", "get_attr")
        if not given and (root in self.writers or not same_bytes(source, copy)):
            return False
        if aliases & self.returned and (given or self.members[root] & self.returned):
            return False  # results share a storage neither with an input nor with each other
        if root not in self.writers:
            return True
        write = self.writers[root][0]
        reads = {user for alias in aliases for user in alias.users} - aliases
        return all(
            self.position[r] < self.position[write]
            or r is write
            and self.same_place(write.args[0], source)
            and copy is r.args[1]
            for r in reads
        )
