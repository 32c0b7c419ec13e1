"""Which operators treat the rows of their operands one by one, and what they are on a part of them.

The rows of a value are its leading dimensions whose product is a number N: [N, V], and [B, S, V] with
B·S = N, have the same rows. On n of them a value is [n, V]. An operator is row-wise if its value on some
rows is that operator on those rows of its operands; it is a sum over rows if the values that it has on
parts of the rows add up to its value. `rule` knows these families, and None for any other operator:

1. elementwise operators, casts and copies: row by row; an operand without the rows is taken whole;
2. reductions, softmax and their gradients, `gather`, `scatter` and the gradient of `select`: row by row, except along the rows;
3. views and fills that keep the rows in front: row by row; the transpose of a matrix has them last;
4. `mm(rows, w)` and `addmm(bias, rows, w)`: row by row;
5. `mm(columns, rows)`, and `sum` over all rows: a sum over rows;
6. the loss of each target by its number (`nll_loss`), and its gradient: row by row; so are losses of each number.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from .compat.sizes import symbols_of_data
from .ordering import is_random
from .step_graph import OPERATOR, mutated_args

aten = torch.ops.aten

# How an operand or a value has the rows: not at all; as the last dimension of a matrix; in front.
WHOLE, COLUMNS, ROWS = "whole", "columns", "rows"
SUM = "sum"  # of a value: parts add up to it

SHORT = (torch.bfloat16, torch.float16)  # whose sums are of float32

SIZE = "rows here"  # stands in arguments for the number of rows

# Elementwise, but not tagged so: by name, because some are only registered once Inductor is imported.
ELEMENTWISE = {"aten::_to_copy", "aten::zeros_like", "aten::ones_like", "aten::full_like",
               "aten::masked_fill", "aten::where", "prims::convert_element_type",
               "aten::binary_cross_entropy_with_logits"}
# Reduce, index or normalize along the dimensions that their argument of this number names.
ALONG = {
    "aten::amax": 1, "aten::amin": 1, "aten::argmax": 1, "aten::argmin": 1, "aten::sum": 1,
    "aten::mean": 1, "aten::logsumexp": 1, "aten::any": 1, "aten::cumsum": 1,
    "aten::_softmax": 1, "aten::_log_softmax": 1, "aten::_softmax_backward_data": 2,
    "aten::_log_softmax_backward_data": 2, "aten::gather": 1, "aten::scatter": 1,
    "aten::scatter_add": 1, "aten::squeeze": 1, "aten::unsqueeze": 1, "aten::slice": 1,
    "aten::select": 1, "aten::select_scatter": 2, "aten::max": 1, "aten::min": 1, "aten::topk": 2, "aten::sort": 1,
}
# Losses of each number and their gradients, elementwise without a reduction, which is this argument.
OF_EACH = {"aten::mse_loss": 2, "aten::smooth_l1_loss": 2, "aten::huber_loss": 2, "aten::soft_margin_loss": 2,
           "aten::binary_cross_entropy": 3, "aten::binary_cross_entropy_with_logits": 4, "aten::mse_loss_backward": 3, "aten::smooth_l1_loss_backward": 3,
           "aten::huber_loss_backward": 3, "aten::soft_margin_loss_backward": 3, "aten::binary_cross_entropy_backward": 4}
SIZED = {"aten::view": 1, "aten::reshape": 1, "aten::_unsafe_view": 1, "aten::expand": 1,
         "aten::full": 0, "aten::zeros": 0, "aten::ones": 0, "aten::new_zeros": 1, "aten::new_full": 1}
RESHAPES = {"aten::view", "aten::reshape", "aten::_unsafe_view"}
PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1}  # and where their left operand is
UNREDUCED = 0  # of nll_loss: a loss for each target


@dataclass(frozen=True)
class Rule:
    """How a value is computed on n rows: from operands that have them as `needs` says, by `target`
    with `args` in which `SIZE` is n; without a target it is its operand."""

    result: str
    needs: Mapping[fx.Node, str]
    target: Any = None
    args: tuple = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def lead(value: Any, rows: int) -> int | None:
    """How many leading dimensions of a tensor are its rows; None if it has none."""
    if not isinstance(value, Tensor):
        return None
    count = 1
    for i, size in enumerate(value.shape):
        count *= size
        if count == rows:
            return i + 1
    return None


def on_rows(value: Tensor, rows: int, size: Any) -> list[Any]:
    """The shape that `value` has on `size` of its rows."""
    return [size, *value.shape[lead(value, rows):]]


def rule(node: fx.Node, known: Mapping[fx.Node, str], rows: int) -> Rule | None:
    """What `node` is on some rows, if the values in `known` have them as it says; None if it is
    not known to be row-wise, nor a sum over rows."""
    target = node.target
    if target is operator.getitem:
        return Rule(ROWS, {node.args[0]: ROWS}, target, node.args) if node.args[0] in known else None
    if not isinstance(target, OPERATOR) or mutated_args(node) or is_random(node):
        return None
    if any(symbols_of_data(n.meta.get("val")) for n in (node, *node.all_input_nodes)):
        return None  # how many rows there are only the data tell
    if any(isinstance(a, fx.Node) for several in (*node.args, node.kwargs.values())
           if isinstance(several, Iterable) for a in several):
        return None  # no operator here takes a tensor by name, or several in one argument
    name = target._schema.name
    if target in PRODUCTS:
        found = _product(node, known, rows)
    elif name in ("aten::t", "aten::permute", "aten::transpose"):
        found = _transpose(node, rows)
    elif name in SIZED:
        found = _sized(node, known, rows, SIZED[name])
    elif name == "aten::select_backward":
        found = _select_backward(node, rows)
    elif name in ALONG or target is aten.sum.default:
        found = _along(node, rows)
    elif name.startswith("aten::nll_loss"):
        found = _loss(node, rows)
    elif torch.Tag.pointwise in target.tags or name in ELEMENTWISE or name in OF_EACH and reduction_of(node) == UNREDUCED:
        found = _elementwise(node, rows)
    else:
        return None
    return found if found and _agrees(found, known) else None


def reduction_of(node: fx.Node) -> int:
    """Of a loss of each number, or of its gradient."""
    place = OF_EACH[node.target._schema.name]
    return node.args[place] if len(node.args) > place else 1


def _agrees(found: Rule, known: Mapping[fx.Node, str]) -> bool:
    return all(known.get(operand, need) == need for operand, need in found.needs.items())


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _elementwise(node: fx.Node, rows: int) -> Rule | None:
    """1. Operands line up with the result from the right."""
    value = _value(node)
    front = lead(value, rows)
    if front is None:
        return None
    needs = {}
    for operand in node.all_input_nodes:
        shape = getattr(_value(operand), "shape", ())
        if len(shape) == value.dim() and shape[:front] == value.shape[:front]:
            needs[operand] = ROWS
        elif all(size == 1 for size in shape[:max(0, len(shape) - value.dim() + front)]) and (
                len(shape) <= value.dim() - front + 1):
            needs[operand] = WHOLE
        else:
            return None
    return Rule(ROWS, needs, node.target, node.args, node.kwargs)


def _along(node: fx.Node, rows: int) -> Rule | None:
    """2, the views of 3 that name a dimension, and the sums of 5."""
    value = _value(node.args[0])
    front = lead(value, rows)
    operands = node.all_input_nodes
    if front is None or not isinstance(_value(node), Tensor | tuple) or any(
            lead(_value(o), rows) != front for o in operands):
        return None
    needs = dict.fromkeys(operands, ROWS)
    if node.target is aten.sum.default:
        return Rule(SUM, needs, node.target, node.args, node.kwargs)
    place = ALONG[node.target._schema.name]
    last = -1 if node.target in (aten.topk.default, aten.sort.default) else None
    given = node.args[place] if len(node.args) > place else last
    if given is None or given == [] or isinstance(given, fx.Node):
        return None
    several = isinstance(given, list | tuple)
    # Counted from the end, dimensions are the same with any number of them in front.
    ends = value.dim() + (node.target is aten.unsqueeze.default)
    dims = [d if d < 0 else d - ends for d in (given if several else [given])]
    inside = [d for d in dims if d >= front - ends]
    if len(inside) == len(dims):
        result, new = ROWS, dims
    elif node.target is aten.sum.dim_IntList and len(dims) - len(inside) == front:
        result, new = SUM, [*inside, -(value.dim() - front + 1)]
        if front > 1 and len(node.args) > 2 and node.args[2]:
            return None  # would keep one dimension for the rows instead of several
    else:
        return None
    args = (*node.args[:place], new if several else new[0], *node.args[place + 1:])
    return Rule(result, needs, node.target, args, node.kwargs)


def _sized(node: fx.Node, known: Mapping[fx.Node, str], rows: int, place: int) -> Rule | None:
    """3: what is told its size."""
    value, name = _value(node), node.target._schema.name
    if lead(value, rows) is None:
        return None
    shape = on_rows(value, rows, SIZE)
    args = (*node.args[:place], shape, *node.args[place + 1:])
    if place == 0:
        return Rule(ROWS, {}, node.target, args, node.kwargs)
    operand = node.args[0]
    if name not in RESHAPES and name != "aten::expand":
        return Rule(ROWS, {operand: known.get(operand, WHOLE)}, node.target, args, node.kwargs)
    source = _value(operand)
    if name == "aten::expand" and source.dim() < len(shape):
        return Rule(ROWS, {operand: WHOLE}, node.target, args, node.kwargs)
    front = lead(source, rows)
    if front is None or name == "aten::expand" and source.dim() != value.dim():
        return None
    if name in RESHAPES and list(source.shape[front:]) == shape[1:]:
        return Rule(ROWS, {operand: ROWS})
    return Rule(ROWS, {operand: ROWS}, node.target, args, node.kwargs)


def _select_backward(node: fx.Node, rows: int) -> Rule | None:
    """2: zeros but for one place of a dimension behind the rows."""
    value, (gradient, _, dim, index) = _value(node), node.args
    front, dim = lead(value, rows), dim % value.dim()
    if front is None or dim < front:
        return None
    return Rule(ROWS, {gradient: ROWS}, node.target, (gradient, on_rows(value, rows, SIZE), dim - value.dim(), index))


def _transpose(node: fx.Node, rows: int) -> Rule | None:
    """3: of a matrix, from rows to columns."""
    value, operand = _value(node), node.args[0]
    if value.dim() != 2 or _value(operand).shape[0] != rows or (
            node.target is aten.permute.default and [d % 2 for d in node.args[1]] != [1, 0]):
        return None
    return Rule(COLUMNS, {operand: ROWS}, node.target, node.args, node.kwargs)


def _product(node: fx.Node, known: Mapping[fx.Node, str], rows: int) -> Rule | None:
    """4 and 5."""
    at = PRODUCTS[node.target]
    left, right = node.args[at:at + 2]
    if left is right:
        return None
    if known.get(left) == ROWS:
        needs = {left: ROWS, right: WHOLE}
        if at:
            if _value(node.args[0]).dim() > 1:
                return None
            needs[node.args[0]] = WHOLE
        return Rule(ROWS, needs, node.target, node.args, node.kwargs)
    if at == 0 and (known.get(left) == COLUMNS or known.get(right) == ROWS) and (
            _value(right).shape[0] == rows):
        return Rule(SUM, {left: COLUMNS, right: ROWS}, node.target, node.args)
    return None


def _loss(node: fx.Node, rows: int) -> Rule | None:
    """6. With a reduction only the gradient is row-wise: it takes the total from outside."""
    forward = node.target is aten.nll_loss_forward.default
    if not forward and node.target is not aten.nll_loss_backward.default:
        return None
    logs, targets, weight, reduction = node.args[:4] if forward else node.args[1:5]
    if _value(logs).dim() != 2 or _value(logs).shape[0] != rows or (
            forward and reduction != UNREDUCED):
        return None
    needs = {logs: ROWS, targets: ROWS}
    if weight is not None:
        needs |= {weight: WHOLE}
    if not forward:
        needs |= {node.args[0]: ROWS if reduction == UNREDUCED else WHOLE, node.args[6]: WHOLE}
    return Rule(ROWS, needs, node.target, node.args, node.kwargs)


def width(value: Any, rows: int) -> int:
    """Elements of a row."""
    return math.prod(value.shape) // rows if isinstance(value, Tensor) else 0


def sized(args: Iterable[Any], size: int) -> Iterator[Any]:
    """The arguments of a rule with the number of rows where they stand for it."""
    for given in args:
        yield [size if s is SIZE else s for s in given] if isinstance(given, list) else given
