"""Sizes that only the data tell: torch's symbols for them, and how large they can be.

``x[mask]`` has as many rows as the mask has trues. For such a number torch has a symbol without a value, with a range
where its operator says one, which is not of use where that depends on another symbol. Beside `compat.trace`.
Checked against torch 2.11 and 2.13.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    free_unbacked_symbols,
)
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

__all__ = ["GuardOnDataDependentSymNode"]

_limits: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by ShapeEnv: of each symbol, in symbols with values
_largest: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by ShapeEnv: of sizes, as numbers


def env_of(size: torch.SymInt) -> Any:
    return size.node.shape_env


def symbols_of_data(value: Any) -> set[sympy.Symbol]:
    """The symbols of what only the data tell in the sizes of a tensor, a nest of them, or a number."""
    if isinstance(value, (tuple, list)):
        return set().union(*map(symbols_of_data, value))
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        return set()
    sizes = (*value.shape, *value.stride(), value.storage_offset()) if isinstance(value, Tensor) else (value,)
    return set().union(*(free_unbacked_symbols(s) for s in sizes if isinstance(s, torch.SymInt | torch.SymFloat)))


def polynomial(size: Any) -> Any:
    """A size that can be compared without a guard: an int, or the sympy expression of a symbolic one.

    That is multiplied out and rid of ``Max(1, t - 1)`` where t is above 1, so that equal sizes are equal: the
    bytes of a tensor come as ``4*s*(t - 1) + 4*s``, those of a view of it as ``4*s*t``.
    """
    node = getattr(size, "node", None)
    return size if node is None else sympy.expand(node.shape_env.simplify(node.expr))


def note_limit(symbol: sympy.Symbol, env: Any, most: Any) -> None:
    """Note that a symbol is at most `most`, an expression in symbols that have values."""
    _limits.setdefault(env, {})[symbol] = sympy.sympify(most)
    _largest.pop(env, None)


def at_most(size: Any) -> Any:
    """As `polynomial`, with each symbol of what only the data tell at its limit; none is below 0."""
    expression = polynomial(size)
    if not isinstance(size, torch.SymInt) or not (symbols := free_unbacked_symbols(size)):
        return expression
    limits = _limits.get(size.node.shape_env, {})
    lowest = dict.fromkeys(symbols, sympy.Integer(0))
    return sum(term.xreplace(lowest if term.could_extract_minus_sign() else limits)
               for term in sympy.Add.make_args(expression))


def largest(size: torch.SymInt) -> int:
    """The most that a size of which only the data tell can be, where other symbols have the values of this trace."""
    env, expression = size.node.shape_env, polynomial(size)
    known = _largest.setdefault(env, {})
    if expression not in known:
        upper = _range(sympy.sympify(expression), env).upper
        known[expression] = int(upper) if upper < sys.maxsize else 0  # only in a model alone, which has no plan
    return known[expression]


def always(condition: Any) -> bool:
    """Whether a condition on sizes holds whatever the data are, where other symbols have the values of this trace."""
    if not isinstance(condition, torch.SymBool):
        return bool(condition)
    env = condition.node.shape_env
    expression = env.simplify(condition.node.expr)
    if isinstance(expression, (sympy.Ge, sympy.Le)):
        more, less = expression.args if isinstance(expression, sympy.Ge) else reversed(expression.args)
        return bool(_range(more - less, env).lower >= 0)
    return expression == sympy.true


def held_equal(condition: Any) -> tuple[sympy.Expr, sympy.Expr] | None:
    """The two sizes that a condition says are equal."""
    expression = condition.node.shape_env.simplify(condition.node.expr)
    return expression.args if isinstance(expression, sympy.Eq) else None


def may_be_zero(number: Any) -> bool:
    """Whether a number that is computed from sizes is not above 0 whatever the data are."""
    return bool(symbols_of_data(number)) and not _range(
        sympy.sympify(polynomial(number)), number.node.shape_env).lower > 0


def _range(expression: sympy.Expr, env: Any) -> ValueRanges:
    values = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val  # 2.13, 2.11
    limits = _limits.get(env, {})
    ranges = {symbol: ValueRanges(0, limits[symbol].xreplace(values)) for symbol in expression.free_symbols & limits.keys()}
    return bound_sympy(expression.xreplace(values), ranges)
