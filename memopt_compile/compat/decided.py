"""What Python decides by numbers of the user's that are tensors in the graph: ``if rate > decay``, ``rate in rates``, and
that a division by zero is an error.

What Python computes from such numbers (`compat.NumberVariable`) is a tensor in the graph too. Their values are known
while the step is traced: the answer is Python's own, computed from these and guarded. Checked against torch 2.11 and 2.13.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._dynamo.exc import raise_observed_exception
from torch._dynamo.guards import _get_closure_vars, install_guard
from torch._dynamo.source import TensorPropertySource, is_from_defaults
from torch._dynamo.variables import builder, lists
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import LocalGeneratorObjectVariable
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

from . import guard_value, source_name


def _clamp(number: float, min: float | None = None, max: float | None = None) -> float:
    number = number if min is None or number >= min else min
    return number if max is None or number <= max else max


MATH = {math.sqrt: torch.sqrt, math.exp: torch.exp, math.expm1: torch.expm1, math.log: torch.log, math.log1p: torch.log1p,
        math.log2: torch.log2, math.log10: torch.log10, math.sin: torch.sin, math.cos: torch.cos, math.tanh: torch.tanh,
        math.fabs: torch.abs, math.pow: torch.pow}
ASKED = (math.isfinite, math.isinf, math.isnan)
# What stands in the graph for Python's own; the first three are Dynamo's.
PYTHONS = {torch.maximum: max, torch.minimum: min, torch.clamp: _clamp, **{new: old for old, new in MATH.items()}}
# And what makes a tensor of a count, for a function of it.
TO_PYTHON = {**PYTHONS, torch.scalar_tensor: lambda count, dtype: float(count)}
DIVISIONS = (operator.truediv, operator.floordiv, operator.mod, operator.itruediv, operator.ifloordiv, operator.imod)
POWERS = (operator.pow, operator.ipow)


@dataclass(frozen=True)
class _At:
    """A number at this place: the given ones, and behind these what is computed."""

    place: int


@dataclass(frozen=True)
class Formula:
    """How Python computes a number: from those at `sources`, whose `values` are known, by one function after the other."""

    sources: tuple[Any, ...]
    values: tuple[float, ...]
    functions: tuple[tuple[Callable, Any, Any], ...]
    result: Any

    def __call__(self, *given: float) -> Any:
        known = list(given)

        def at(value: Any) -> Any:
            return known[value.place] if isinstance(value, _At) else value

        for function, args, kwargs in self.functions:
            known.append(function(*map(at, args), **{key: at(value) for key, value in kwargs.items()}))
        return at(self.result)


def is_given(node: fx.Node) -> bool:
    """Whether this is a number of the user's, which Dynamo hands over as a tensor."""
    return node.op == "placeholder" and getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False)


def formula(variable: Any) -> Formula | None:
    """How a number that Dynamo follows is computed from the user's; None for a tensor of the user's, and all else."""
    variable = variable.realize()
    if isinstance(variable, ConstantVariable) and isinstance(variable.value, int | float):
        return Formula((), (), (), variable.value)
    if not isinstance(variable, TensorVariable | SymNodeVariable) or not isinstance(result := variable.as_proxy().node, fx.Node):
        return None
    needed, stack = {result}, [result]
    while stack:
        for node in stack.pop().all_input_nodes:
            if node not in needed:
                needed.add(node)
                stack.append(node)
    nodes = [node for node in result.graph.nodes if node in needed]
    given = [node for node in nodes if node.op == "placeholder"]
    values = [_value(node) for node in given]
    computed = [node for node in nodes if node.op != "placeholder"]
    if None in values or not all(map(_is_pythons, computed)):
        return None
    places = {node: _At(i) for i, node in enumerate((*given, *computed))}
    functions = tuple((TO_PYTHON.get(node.target, node.target), *(
        fx.node.map_arg(part, places.__getitem__) for part in (node.args, node.kwargs))) for node in computed)
    return Formula(tuple(node.meta["grapharg"].source for node in given), tuple(values), functions, places[result])


def _value(node: fx.Node) -> float | None:
    if is_given(node):
        return node.meta["grapharg"].example.item()
    value = node.meta.get("example_value")
    known = isinstance(value, torch.SymInt | torch.SymFloat) and node.meta.get("grapharg") is not None
    return value.node.hint if known and node.meta["grapharg"].source is not None else None


def _is_pythons(node: fx.Node) -> bool:
    return node.op == "call_function" and (node.target in TO_PYTHON or getattr(
        node.target, "__module__", "") in ("_operator", "math")) and not any(
            isinstance(arg, list | tuple | slice) for arg in (*node.args, *node.kwargs.values()))


def decided(variables: Sequence[Any], answer: Callable[..., Any], what: str) -> tuple[Any] | None:
    """(the `answer` to these numbers), guarded; None if they are not all known, or none is a tensor in the graph."""
    formulas = [formula(variable) for variable in variables]
    return _decide(formulas, answer, what) if any(isinstance(each.realize(), TensorVariable) for each in variables) else None


def _decide(formulas: Sequence[Formula | None], answer: Callable[..., Any], what: str) -> tuple[Any] | None:
    if None in formulas:
        return None
    counts = [len(each.sources) for each in formulas]
    sources = [source for each in formulas for source in each.sources]

    def now(values: Sequence[float]) -> Any:
        left = iter(values)
        return answer(*(each(*(next(left) for _ in range(n))) for each, n in zip(formulas, counts)))

    def holds(values: Sequence[float]) -> bool:
        try:
            return now(values) == known
        except (ArithmeticError, ValueError, TypeError):
            return False

    try:
        known = now([value for each in formulas for value in each.values])
    except (ArithmeticError, ValueError, TypeError):
        return None
    distinct = set(map(source_name, sources))
    if len(distinct) == 1:
        guard_value(sources[0], lambda value: holds([value] * len(sources)), what)
    else:
        _guard_together(sources, holds, what)
    return (known,)


def _guard_together(sources: Sequence[Any], holds: Callable[[Sequence[float]], bool], what: str) -> None:
    """Recompile once ``holds(values of sources)`` is false."""
    def add_guard(made: Any, guard: Any) -> None:
        names = made.scope["G"]

        def read(frame: Any) -> list:
            scope = {"L": frame, "G": names}
            return [source.get_value(scope, dict(_get_closure_vars()), {}) for source in sources]

        manager = made.guard_manager.root.lambda_manager(
            python_lambda=read, source=f"{what} {[source_name(s) for s in sources]}", example_value=[],
            guard_manager_enum=made.get_guard_manager_type(sources[0], None))
        try:
            manager.add_lambda_guard(holds, [what])
        except TypeError:  # torch 2.13 also takes the user's stack
            manager.add_lambda_guard(holds, [what], None)

    install_guard(sources[0].make_guard(add_guard))


def refuse_zero(tx: Any, function: Callable, args: Sequence[Any]) -> None:
    """A division of numbers by zero is an error of Python's, which the user's code may expect. Of tensors it is none."""
    if len(args) != 2 or not (function in DIVISIONS or function in POWERS):
        return
    by = args[1].realize()
    if function in DIVISIONS and isinstance(by, TensorVariable) and formula(args[0]) is not None:
        zero = decided([by], lambda number: number == 0, "a divisor of zero")
    elif function in POWERS and isinstance(by, ConstantVariable) and isinstance(by.value, int | float) and by.value < 0:
        zero = decided([args[0]], lambda number: number == 0, "a power of zero")
    else:
        return
    if zero == (True,):
        raise_observed_exception(ZeroDivisionError, tx, args=["division by zero"])


def _fails(function: Callable, *numbers: float) -> bool:
    try:
        function(*numbers)
    except (ArithmeticError, ValueError):
        return True
    return False


def computed(tx: Any, function: Callable, args: Sequence[Any]) -> Any:
    """The result of ``math.sqrt(rate)``, ``pow(rate, 2)``, ``isinstance(rate, float)`` and the like; None for anything
    but a number of the user's that is a tensor in the graph."""
    if function in ASKED:
        answer = decided(args, function, function.__name__)
        return answer and ConstantVariable.create(*answer)
    if function is math.pow and (powers := _as_operands(args)):
        return VariableTracker.build(tx, operator.pow).call_function(tx, powers, {})
    if function in MATH and len(args) == 1 and isinstance(count := args[0].realize(), SymNodeVariable):
        return _of_count(tx, function, count)
    if function in MATH:
        fails = decided(args, functools.partial(_fails, function), f"math.{function.__name__}")
        return VariableTracker.build(tx, MATH[function]).call_function(tx, list(args), {}) if fails == (False,) else None
    if function is pow and len(args) == 2 and _is_number(args[0]):
        return VariableTracker.build(tx, operator.pow).call_function(tx, list(args), {})
    if function is isinstance and not _knows_tensors(tx) and len(args) == 2 and args[1].is_python_constant() and _is_number(args[0]):
        return ConstantVariable.create(issubclass(float, args[1].as_python_constant()))
    return None


def _of_count(tx: Any, function: Callable, count: SymNodeVariable) -> Any:
    """The result of ``math.exp(-count / 10)``: Dynamo would make a constant of the count. None where it has a symbol, and
    for sizes, whose functions are mostly settings."""
    how = None if function in (math.sqrt, math.sin, math.cos, math.tanh) else formula(count)
    if how is None or any(isinstance(source, TensorPropertySource) for source in how.sources) or _decide(
            [how], functools.partial(_fails, function), f"math.{function.__name__}") != (False,):
        return None
    number = VariableTracker.build(tx, torch.scalar_tensor).call_function(
        tx, [count], {"dtype": ConstantVariable.create(torch.float64)})
    return VariableTracker.build(tx, MATH[function]).call_function(tx, [number], {})


def _knows_tensors(tx: Any) -> bool:
    """Whether it is torch's optimizers or ours that ask: they take the tensor in place of a number for what it is."""
    return tx.f_globals.get("__name__", "").startswith(("torch.", "memopt_compile."))


def _as_operands(args: Sequence[Any]) -> list | None:
    """Those of ``math.pow(beta, step)`` with a count, which is ``beta ** step``: there Dynamo makes no constant of it."""
    base, exponent = given = [each.realize() for each in args]
    constants = [each for each in given if isinstance(each, ConstantVariable) and isinstance(each.value, int | float)]
    counts = [each for each in given if isinstance(each, SymNodeVariable)]
    if not counts or len(constants) + len(counts) < 2 or not (base.sym_num if base in counts else base.value) > 0:
        return None
    return [ConstantVariable.create(float(each.value)) if each in constants else each for each in given]


def _is_number(variable: Any) -> bool:
    return isinstance(variable.realize(), TensorVariable) and formula(variable) is not None


def _contains(original: Callable, items: Any, search: Any, tx: Any, check_tensor_identity: bool = False) -> Any:
    """``rate in [0.0, other]``: Dynamo asks whether they are one tensor, which of equal numbers they are not."""
    items = [each.realize() for each in items]
    found = [decided([each, search], operator.eq, "in a list") for each in items]
    if not any(found):
        return original(items, search, tx, check_tensor_identity)
    known = any(each == (True,) for each in found)
    left = [each for each, answer in zip(items, found) if answer is None]
    return ConstantVariable.create(True) if known else original(left, search, tx, check_tensor_identity)


def of_items(tx: Any, function: Callable, args: Sequence[Any]) -> Sequence[Any]:
    """The arguments of ``max(rate for ...)`` or ``max([rate])``: of tensors Dynamo takes neither."""
    if function not in (max, min) or len(args) != 1 or not isinstance(
            args[0].realize(), BaseListVariable | LocalGeneratorObjectVariable):
        return args
    items = VariableTracker.build(tx, tuple).call_function(tx, list(args), {}).items
    return [*items, *items] if len(items) == 1 else items or args


def patches() -> list[Any]:
    """In force while a frame is traced."""
    return [mock.patch.object(lists, "iter_contains", functools.partial(_contains, lists.iter_contains)),
            # A count of a global optimizer is no constant either, once it has changed.
            mock.patch.object(builder, "is_int_specialization_case", lambda value, source: is_from_defaults(source))]
