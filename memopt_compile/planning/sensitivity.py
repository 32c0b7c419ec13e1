"""What backward does with an activation, and so which formats it may be kept in.

Taken from the operators that read it, never from the names of modules:

1. *Exact*: a difference would be amplified, would change a decision, or would be seen elsewhere than
   in gradients. Denominators, what is exponentiated (and the logarithms of probabilities), what is
   compared, integers, what a metric behind `backward()` reads, and every operator that is not known here.
2. *Follows*: statistics of other activations (mean and deviation of a normalization, the
   normalizer of an attention; where these are taken apart, as for Inductor, whatever one element of goes with
   many of another). They are small, and have to fit the activation that they are of: they are
   kept exactly, or computed again from what it came back as.
3. *Tolerant*: what enters a product or a sum. An error of a few per cent in it is one of a few per
   cent in a gradient.

A fused attention computes its probabilities anew from query and key and divides by the normalizer of
forward: with another query these do not add up to 1. So where query or key are not exact, the
attention runs again (`Sensitivity.together`).
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.sizes import symbols_of_data
from ..compat.trace import hinted
from ..compression import is_dense
from ..step_graph import OPERATOR, Phase, StepGraph, aliased_args, mutated_args, storage_roots


class Use(enum.IntEnum):
    TOLERANT = 0
    FOLLOWS = 1
    EXACT = 2


T, F, E = Use.TOLERANT, Use.FOLLOWS, Use.EXACT
_NORM = {"input": T, "mean": F, "rstd": F, "save_mean": F, "save_invstd": F, "weight": T}
_ATTENTION = {"query": T, "key": T, "value": T, "out": T, "logsumexp": F, "attn_bias": E, "attn_mask": E}
# What the arguments of an operator are to it; those that are not named are gradients, or exact.
SAVED: dict[str, dict[str, Use]] = {
    **dict.fromkeys(("native_layer_norm_backward", "native_group_norm_backward",
                     "native_batch_norm_backward", "cudnn_batch_norm_backward",
                     "_fused_rms_norm_backward"), _NORM),
    **{f"_scaled_dot_product_{kind}_backward": _ATTENTION for kind in (
        "flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")},
    "convolution_backward": {"input": T, "weight": T},
    **{f"{name}_backward": {"self": T, "output": T} for name in (
        "gelu", "silu", "sigmoid", "tanh", "threshold", "leaky_relu", "hardswish", "softplus",
        "hardsigmoid", "mish", "glu")},
    "_softmax_backward_data": {"output": T},
    "max_pool2d_with_indices_backward": {"self": T},  # no more of it than its shape is read
    "native_dropout_backward": {},
}
# Of one operand only, whose results go together: they may run again on what is not exact.
CONSISTENT = {"native_layer_norm", "native_group_norm", "_fused_rms_norm", "_softmax", "convolution",
              *(f"_scaled_dot_product_{kind}" for kind in (
                  "flash_attention_for_cpu", "flash_attention", "efficient_attention",
                  "cudnn_attention"))}
# Sums, products and what moves elements: all their floating operands.
LINEAR = {"mm", "addmm", "bmm", "baddbmm", "sum", "mean", "cat", "clone", "index", "index_select",
          "gather", "slice_scatter", "constant_pad_nd", "cumsum", "_grouped_mm", "_to_copy"}
# Pointwise operators through which a small difference may become a large one.
STEEP = {"exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "reciprocal", "rsqrt", "sqrt",
         "acos", "asin", "acosh", "atanh", "erfinv", "logit", "lgamma", "digamma", "sinh", "cosh",
         "tan", "fmod", "remainder", "floor", "ceil", "round", "trunc", "sign", "sgn", "pow"}


def uses(reader: fx.Node) -> Iterator[tuple[fx.Node, str, Use]]:
    """(operand, name of the argument, what it is to `reader`) for all operands."""
    if not isinstance(reader.target, OPERATOR):
        for operand in reader.all_input_nodes:
            yield operand, "", E
        return
    arguments = reader.target._schema.arguments
    for i, argument in enumerate(arguments):
        given = reader.kwargs.get(argument.name, reader.args[i] if i < len(reader.args) else None)
        for operand in (given if isinstance(given, list | tuple) else (given,)):
            if isinstance(operand, fx.Node):
                yield operand, argument.name, _use(reader, operand, argument.name)


def _use(reader: fx.Node, operand: fx.Node, argument: str) -> Use:
    name = _name(reader)
    if not _floating(operand) or not _floating(reader):
        return E  # integers and booleans decide
    if name in SAVED:
        return SAVED[name].get(argument, E)
    if name in LINEAR:
        return T
    if not _is_pointwise(reader.target.namespace, name):
        return E
    if name == "pow":
        exponent = reader.args[1]
        return T if isinstance(exponent, int | float) and exponent >= 1 else E
    # The difference to a maximum or a normalizer is what a softmax exponentiates.
    exponentiated = name in ("sub", "add") and any(_name(u) in ("exp", "exp2") for u in reader.users)
    if name in STEEP or exponentiated or name == "div" and argument == "other":
        return E
    return F if _broadcast(operand, reader) else T  # its error is the same for many, and does not average out


@functools.cache
def _is_pointwise(namespace: str, name: str) -> bool:
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, form).tags for form in packet.overloads())


def _broadcast(operand: fx.Node, reader: fx.Node) -> bool:
    """Whether an element of what `operand` is a view of goes with several of the pointwise `reader`."""
    given, made = operand.meta["val"], reader.meta["val"]
    if symbols_of_data((given.untyped_storage().nbytes(), *made.shape)):
        return False  # nothing of it is compressed
    return hinted(given.untyped_storage().nbytes()) < hinted(made.numel()) * given.element_size()


def may_follow(operation: fx.Node, operand: fx.Node) -> bool:
    """Whether an operation of forward may run again on an operand that is not exact."""
    if aliased_args(operation):
        return True
    return all(use is T or argument not in ("mask", "attn_mask") and _name(operation) in CONSISTENT
               for given, argument, use in uses(operation) if given is operand)


def _name(node: fx.Node) -> str:
    """Of the operator, wherever it writes its result."""
    return node.target._schema.name.split("::")[1].removesuffix("_") if isinstance(node.target, OPERATOR) else ""


def _floating(node: fx.Node) -> bool:
    values = node.meta.get("val")
    values = values if isinstance(values, list | tuple) else (values,)
    return all(v.is_floating_point() for v in values if isinstance(v, Tensor))


def _asks_for_sign(reader: fx.Node, argument: str) -> bool:
    """Whether `reader` asks of this argument only whether it is ≤ 0."""
    return (_name(reader), argument) in (("threshold_backward", "self"), ("le", "self")) and (
        reader.args[-1] == 0)


@dataclass(frozen=True)
class Sensitivity:
    """For the storages that forward makes and backward reads: the `use`, the worst of any reader's;
    the names of `formats` that are made for them, the gentlest first; and for a query or key the
    attentions that have to run `together` with any change of it."""

    use: dict[fx.Node, Use] = field(default_factory=dict)
    formats: dict[fx.Node, tuple[str, ...]] = field(default_factory=dict)
    together: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)


LOSSY: dict[str | None, tuple[str, ...]] = {
    None: (), "int8": ("int8",), "int4": ("int4",), "auto": ("int8", "int4")}


def sensitivity(step: StepGraph, compress: str | None) -> Sensitivity:
    """What may be kept how in `step`, with the option `compress`; lossless formats in any case."""
    found = Sensitivity()
    roots = storage_roots(step.graph)
    signs: dict[fx.Node, bool] = {}
    attended: set[fx.Node] = set()
    inside = only_for_gradients(step)
    for reader in step.computing():
        writes = mutated_args(reader)
        if step.phase(reader) is not Phase.BACKWARD or aliased_args(reader) and not writes:
            continue
        for operand, argument, use in uses(reader):
            use = use if reader in inside else E
            for root in roots[operand]:
                found.use[root] = max(found.use.get(root, T), use)
                signs[root] = signs.get(root, True) and _asks_for_sign(reader, argument)
                if "_scaled_dot_product" in _name(reader) and argument in ("query", "key", "value"):
                    attended.add(root)
                    if argument != "value":
                        found.together.setdefault(root, []).extend(_normalizers(reader, roots))
    for node, use in found.use.items():
        value = node.meta.get("val")
        if (isinstance(value, Tensor) and is_dense(value) and value.numel()
                and step.phase(node) is Phase.FORWARD):
            found.formats[node] = tuple(
                _formats(node, use, signs[node], node in attended, LOSSY[compress]))
    return found


def only_for_gradients(step: StepGraph) -> set[fx.Node]:
    """The nodes of backward from which nothing leads anywhere but through a parameter's gradient. Of those that write in
    place none into what forward made, or anything else reads later."""
    found, roots = set(step.gradients), storage_roots(step.graph)
    gradients = {root for node in found for root in roots[node]}
    elsewhere = {root for value in step.graph.output_node().all_input_nodes for root in roots[value]} - gradients
    for node in reversed(list(step.computing())):
        if (step.phase(node) is Phase.BACKWARD and all(user in found for user in node.users)
                and all(step.phases.get(root) is Phase.BACKWARD and root not in elsewhere
                        for argument in mutated_args(node) for root in roots[argument])):
            found.add(node)
        elif node not in found:
            elsewhere.update({root for value in node.all_input_nodes for root in roots[value]} - gradients)
    return found


def _normalizers(reader: fx.Node, roots: Any) -> list[fx.Node]:
    return [root for operand, argument, _ in uses(reader) if argument == "logsumexp"
            for root in roots[operand]]


def _formats(node: fx.Node, use: Use, sign: bool, attended: bool, lossy: tuple[str, ...]) -> Iterator[str]:
    value = node.meta["val"]
    if value.dtype == torch.bool:
        yield "1-bit mask"
    elif value.dtype == torch.int64 and (bound := _bound(node)):
        yield next(f"{t} index" for t, most in (("uint8", 2**8), ("int16", 2**15), ("int32", 2**31))
                   if bound <= most)
    elif value.is_floating_point() and sign:
        yield "1-bit sign"
    elif value.is_floating_point() and use is T:
        if "int8" in lossy:
            yield "int8"
        if "int4" in lossy:
            channels = value.stride(-1) == 1 and value.shape[-1] >= 32
            yield ("int4 channels" if attended else "int4 offset" if _is_softmax(node) else
                   "int4 outliers" if channels else "int4")


def _is_softmax(node: fx.Node) -> bool:
    return _name(node) == "_softmax" or _name(node) == "div" and _name(node.args[0]) == "exp"


def _bound(node: fx.Node) -> int | None:
    """What the integers of `node` are below, if its operator says so."""
    if node.target is operator.getitem and _name(node.args[0]) == "max_pool2d_with_indices":
        image = node.args[0].args[0].meta["val"]
        return image.shape[-1] * image.shape[-2]
    return None
