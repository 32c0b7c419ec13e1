"""Operators that Dynamo gives a number which changes from call to call: a decay, a learning rate, a range.

It follows such a number as a symbol. Where an operator wants a plain one it makes a constant of it, and a graph for
each of its values, till torch has compiled the step too often. Here the operator gets a 0-dim tensor in its place.
Checked against torch 2.11, 2.12 and 2.13.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.fx.passes import _tensorify_python_scalars as tensorify

from . import drawing, fake_value, number_forms

COUNTS_EXPRESSIONS = "tensorified_symbols.add(" in inspect.getsource(tensorify)  # before torch 2.13
# As a tensor such a number has the operand's type, which must not round it more than the operator does.
EXACT = (torch.float32, torch.float64)
OPERANDS = {"lerp": ("end", "weight"), "clamp": ("min", "max"), "clip": ("min", "max"), "clamp_min": ("min",),
            "clamp_max": ("max",), "masked_fill": ("mask", "value"), "fill": ("value",), "pow": ("exponent",)}  # or by name
METHODS = {torch.add: "add", torch.sub: "sub", torch.lerp: "lerp", torch.clamp: "clamp", torch.clip: "clip",
           torch.clamp_min: "clamp_min", torch.clamp_max: "clamp_max", torch.masked_fill: "masked_fill", torch.pow: "pow"}


def with_tensors(tx: Any, value: Any, name: str, args: Any, kwargs: dict) -> tuple[str, Any, dict]:
    """A call of ``value.name(...)`` with tensors for the numbers that change (``add_(grad, alpha=-lr)``)."""
    plain = name.rstrip("_")
    if plain in ("add", "sub") and is_symbolic(kwargs.get("alpha")):
        alpha = _tensor(tx, kwargs["alpha"], -1.0 if plain == "sub" else 1.0, dtype=torch.float64)
        return name.replace("sub", "add"), args, {**kwargs, "alpha": alpha}
    if plain == "sub" and isinstance(alpha := kwargs.get("alpha"), TensorVariable):
        return name.replace("sub", "add"), args, {**kwargs, "alpha": alpha.call_method(tx, "neg", [], {})}
    if name == "__setitem__" and is_symbolic(args[1]) and (like := fake_value(value)).dtype in EXACT:
        return name, [args[0], _tensor(tx, args[1], dtype=like.dtype, device=like.device)], kwargs
    if plain == "lerp":
        args, kwargs = [_weight(tx, value, each) for each in args], {k: _weight(tx, value, v) for k, v in kwargs.items()}
    if plain not in OPERANDS or not any(map(is_symbolic, (*args, *kwargs.values()))):
        return name, args, kwargs
    like, given = fake_value(value), {**dict(zip(OPERANDS[plain], args)), **kwargs}
    if like.dtype not in EXACT or not set(given) <= set(OPERANDS[plain]):
        return name, args, kwargs
    # Of a clamp both are tensors then, or none.
    tensors = {key: _tensor(tx, each, dtype=like.dtype, device=like.device) if is_number(each) else each
               for key, each in given.items()}
    return name, [], tensors


def _weight(tx: Any, value: Any, weight: Any) -> Any:
    """A number in a tensor, as which `lerp` takes one: its operand's type. (Of eager's own, of another type, it takes none.)"""
    weight, like = weight.realize(), fake_value(value)
    if not isinstance(weight, TensorVariable) or fake_value(weight).dtype is not torch.float64 or (
            like.dtype is torch.float64 or fake_value(weight).dim() or not like.is_floating_point()):
        return weight
    return weight.call_method(tx, "to", [VariableTracker.build(tx, like.dtype)], {})


def drawn(tx: Any, value: Any, name: str, args: Any, kwargs: dict) -> Any:
    """The result of ``value.uniform_(-r, r)`` and the like with a number that changes; None for what needs no care."""
    if not any(map(is_symbolic, (*args, *kwargs.values()))):
        return None
    if name in number_forms.METHODS:
        return UserFunctionVariable(number_forms.METHODS[name]).call_function(tx, [value, *args], kwargs)
    if name not in drawing.METHODS:
        return None
    operator, defaults = drawing.METHODS[name]
    given = {**{key: ConstantVariable.create(each) for key, each in defaults.items()}, **dict(zip(defaults, args)), **kwargs}
    if set(given) > set(defaults) or not all(map(is_number, given.values())):
        return None
    numbers = [_on_host(tx, given[key]) for key in defaults]
    made = VariableTracker.build(tx, operator).call_function(tx, [value, *numbers], {})
    return value.call_method(tx, "copy_", [made], {})


def computed(tx: Any, function: Any, args: Any) -> Any:
    """The result of ``number - tensor``, ``tensor ** number`` and the like with a number that changes; None for anything
    else. (A power of a number that changes would have no gradient.)"""
    if len(args) != 2 or function not in (operator.sub, operator.pow):
        return None
    if is_symbolic(args[0]) and _is_exact(args[1]):
        form = number_forms.subtract_from if function is operator.sub else number_forms.power_of
        return UserFunctionVariable(form).call_function(tx, [args[1], args[0]], {})
    if function is operator.pow and is_symbolic(args[1]) and _is_exact(args[0]):
        return args[0].realize().call_method(tx, "pow", [args[1]], {})
    return None


def _is_exact(given: Any) -> bool:
    given = given.realize()
    return isinstance(given, TensorVariable) and fake_value(given).dtype in EXACT


def _dropped_out(tx: Any, x: Any, p: Any = None, training: Any = None, inplace: Any = None) -> Any:
    if not is_symbolic(p) or not all(each is None or each.is_python_constant() for each in (training, inplace)):
        return None
    if inplace is not None and inplace.as_python_constant():
        return None
    if training is not None and not training.as_python_constant():
        return x
    return UserFunctionVariable(drawing.dropout).call_function(tx, [x, _on_host(tx, p)], {})


def called_as_method(tx: Any, function: Any, args: Any, kwargs: dict) -> Any:
    """The result of ``torch.clamp(x, -r, r)`` and the like with a number that changes; None for what needs no care."""
    listed = function is torch.tensor and isinstance(args[0].realize(), BaseListVariable)
    if not any(map(is_symbolic, args[0].realize().items if listed else (*args, *kwargs.values()))) or "out" in kwargs:
        return None
    form = number_forms.FORMS.get(function)
    if form is not None and tx.f_code is not form.__code__ and number_forms.fits(form, len(args), kwargs):  # not in itself
        return UserFunctionVariable(form).call_function(tx, list(args), kwargs)
    if function in (torch.nn.functional.dropout, torch.dropout):
        return _dropped_out(tx, *args, **{{"input": "x", "train": "training"}.get(k, k): v for k, v in kwargs.items()})
    if function is torch.normal and len(args) + len(kwargs) > 2 and "generator" not in kwargs:
        return UserFunctionVariable(drawing.normal_of_size).call_function(tx, list(args), kwargs)
    if function in METHODS and args and isinstance(tensor := args[0].realize(), TensorVariable):
        return tensor.call_method(tx, METHODS[function], list(args[1:]), kwargs)
    return None


def add_scaled(original: Callable, self: Any, tx: Any, other: Any, *, alpha: Any = None) -> Any:
    """``add_(other, alpha=number)`` with a number that is a tensor: the operator whose kernel gives eager's bits.
    (torch 2.11 rounds a product of its own, of plain numbers too; 2.13 has a private operator that does so without
    Inductor.)"""
    if alpha is not None and alpha.is_python_constant():
        return None
    if not isinstance(alpha, TensorVariable):
        return original(self, tx, other, alpha=alpha)
    if _adds_in_float32(self):
        return self.call_method(tx, "addcmul_", [other, alpha], {})
    return self.call_method(tx, "copy_", [sum_scaled(tx, self, other, alpha)], {})


def add_quotient(original: Callable, self: Any, tx: Any, a: Any, b: Any, *, value: Any = None) -> Any:
    """``addcdiv_(a, b, value=number)``."""
    if not _adds_in_float32(self):
        return original(self, tx, a, b, value=value)
    if value is None or value.is_python_constant():
        return None
    quotient = TorchInGraphFunctionVariable(torch.div).call_function(tx, [a, b], {})
    return self.call_method(tx, "addcmul_", [quotient, _on_host(tx, value) if is_symbolic(value) else value], {})


def _adds_in_float32(value: Any) -> bool:
    """Of a `LowPrecisionTensor` of 16 bits: a sum of its type that is copied into it had lost what is small."""
    return getattr(fake_value(value), "writes_in_float32", False)


def sum_scaled(tx: Any, value: Any, other: Any, alpha: Any) -> Any:
    return TorchInGraphFunctionVariable(torch.addcmul).call_function(tx, [value, other, alpha], {})


def is_symbolic(given: Any) -> bool:
    """Whether an argument is a float that Dynamo follows as a symbol."""
    given = given and given.realize()
    return isinstance(given, SymNodeVariable) and isinstance(given.sym_num, torch.SymFloat)


def is_number(given: Any) -> bool:
    given = given.realize()
    return is_symbolic(given) or isinstance(given, ConstantVariable) and isinstance(given.value, int | float)


def _on_host(tx: Any, number: Any) -> Any:
    return _tensor(tx, number, dtype=torch.float64, device="cpu")


def _tensor(tx: Any, number: Any, times: float = 1.0, **kind: Any) -> Any:
    one = VariableTracker.build(tx, torch.full).call_function(
        tx, [VariableTracker.build(tx, ()), ConstantVariable.create(times)],
        {key: VariableTracker.build(tx, of) for key, of in kind.items()})
    return one.call_method(tx, "mul", [number], {})


def read_alone(original: Callable, module: Any, *rest: Any) -> None:
    """torch's pass that has tensors in place of numbers, for a graph that reads each number by itself too.

    Before torch 2.13 that pass takes a number which is only read through arithmetic (``loss * (1 - 0.1 * rate)``) for one
    that it has found no tensor for, and makes a constant of it. The products that are put in have no readers, and go.
    """
    if COUNTS_EXPRESSIONS:
        found: set = set()
        for node in module.graph.nodes:
            if node.target in tensorify.SUPPORTED_OPS:
                for each in node.all_input_nodes:
                    if isinstance(value := each.meta.get("val"), torch.SymFloat):
                        found |= value.node.expr.free_symbols
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default):
            if node.meta["val"].node.expr in found:
                with module.graph.inserting_after(node):
                    product = module.graph.call_function(torch.ops.aten.mul.Tensor, (node.args[0], node))
                product.meta["val"] = node.args[0].meta["val"]
    original(module, *rest)
