"""Whether what a step graph says of its values is what its operators make: shapes, strides and types.

Of a few results torch itself says the wrong type, which `correct_types` puts right. To check the rest every operator runs
again on fake tensors, in the graph's order. That takes as long as tracing did, so passes are held to it by their tests and
by `verify=True`, not in every compilation.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from . import compat
from .compat.trace import pytree
from .errors import VerifyError
from .step_graph import StepGraph, describe, source_line

aten = torch.ops.aten
NORMS = (aten.native_layer_norm.default, aten.native_group_norm.default, aten.native_batch_norm.default,
         aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats,
         aten._native_batch_norm_legit_functional.default)
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


def correct_types(graph: fx.Graph) -> None:
    """What a CPU's kernels make, where torch has another type for it. What reads that would be sized, and tried out, with
    the wrong one.

    - A norm's mean and deviation are float32 if its weights or running statistics are, though its input has 16 bits.
    - The normalizer of an attention in float64 is float64 (torch 2.11).
    """
    corrected: set[fx.Node] = set()
    for node in graph.nodes:
        values = node.meta.get("val")
        if node.target is operator.getitem and node.args[0] in corrected:
            node.meta["val"] = node.args[0].meta["val"][node.args[1]]
        elif node.target is aten.detach.default and node.args[0] in corrected:
            node.meta["val"] = node.args[0].meta["val"]
        elif wrong := {i: t for i, t in _of_kernels(node).items() if values[i].dtype != t}:
            with values[0].fake_mode:
                node.meta["val"] = tuple(v.to(wrong[i]) if i in wrong else v for i, v in enumerate(values))
        else:
            continue
        corrected.add(node)


def _of_kernels(node: fx.Node) -> dict[int, torch.dtype]:
    """The types of those results that may be recorded wrongly, by their places."""
    if node.target not in (*NORMS, ATTENTION) or node.meta["val"][0].device.type != "cpu":
        return {}
    if node.target is ATTENTION:
        return {1: torch.float64} if node.meta["val"][0].dtype == torch.float64 else {}
    read = {a.meta["val"].dtype for a in node.all_input_nodes if isinstance(a.meta["val"], Tensor)}
    return dict.fromkeys((1, 2), torch.float32) if torch.float32 in read else {}


def write_sizes_out(step: StepGraph) -> None:
    """Write a number wherever a symbol has a value by now: where operators are given sizes, and in what they are recorded
    to make. Passes that count rows want numbers, and Inductor takes no symbol with a value for a float."""
    bases = dict[int, Tensor]()
    for node in list(step.graph.nodes):
        value = node.meta.get("val")
        known = _number(value)
        if known is not value:
            for user in [user for user in node.users if user.op != "output"]:
                given = {**{n: n for n in user.all_input_nodes}, node: known}
                user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), given.__getitem__)
            if node.op == "call_function" and not node.users:
                step.erase(node)
        elif _symbolic(value):
            node.meta["val"] = pytree.tree_map_only(Tensor, lambda tensor: _of_numbers(tensor, bases), value)


def _number(value: Any) -> Any:
    """The number that a symbol stands for, if it is known."""
    known = (value.node.maybe_as_int() if isinstance(value, torch.SymInt) else
             value.node.maybe_as_float() if isinstance(value, torch.SymFloat) else None)
    return value if known is None else known


def _of_numbers(tensor: Tensor, bases: dict[int, Tensor]) -> Tensor:
    """The same fake tensor with numbers for sizes; of one storage, if others are."""
    storage, size = tensor.untyped_storage(), _number(tensor.untyped_storage().nbytes())
    if tensor.layout is not torch.strided or not isinstance(size, int) or not _symbolic(tensor):
        return tensor
    with tensor.fake_mode, torch.no_grad():
        base = bases.setdefault(storage._cdata, torch.empty(size, dtype=torch.uint8, device=tensor.device))
        whole = base[:size // tensor.element_size() * tensor.element_size()].view(tensor.dtype)
        return whole.as_strided(*[[_number(n) for n in sizes] for sizes in (tensor.shape, tensor.stride())],
                                _number(tensor.storage_offset()))


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
        if _of_kernels(n):
            return known
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
