"""The peak of a step as a formula in its dynamic sizes, and the largest batch that fits.

A step captured with dynamic shapes (another batch size on a later call, or
`torch._dynamo.mark_dynamic`) has symbols for sizes. Live bytes are sums of products of them, so
the peak is the maximum of polynomials; those that another is never below are left out.
"""

from __future__ import annotations

from typing import Any

import sympy

from .compat_trace import hinted
from .errors import OptionError
from .liveness import lifetimes, live_bytes
from .step_graph import StepGraph, nbytes


def expression(size: Any) -> sympy.Expr:
    """A number of bytes, symbolic or not, as a sympy expression."""
    node = getattr(size, "node", None)
    return sympy.Integer(size) if node is None else sympy.sympify(node.expr)


def peak_formula(step: StepGraph) -> sympy.Expr:
    """Peak bytes of `step` in its present order, inputs included, as a formula in its symbols.

    Workspace of library operators is not in it: that is measured for one size, not derived.
    """
    life = lifetimes(step.graph, expression)
    points = {sympy.expand(p) for p in live_bytes(step.computing(), life)}
    highest = [p for p in points if not any(_never_below(q, p) for q in points if q != p)]
    peak = sympy.Max(*highest) if highest else sympy.Integer(0)
    return sum(nbytes(p.meta.get("val"), expression) for p in step.placeholders) + peak


def _never_below(a: sympy.Expr, b: sympy.Expr) -> bool:
    """Whether a ≥ b for all positive sizes, by the signs of the coefficients of a - b."""
    terms = sympy.Add.make_args(sympy.expand(a - b))
    return all(term.as_coeff_Mul()[0] >= 0 for term in terms)


def symbols(step: StepGraph) -> dict[sympy.Symbol, int]:
    """The symbols of the step's sizes, with the values it was captured for."""
    found: dict[sympy.Symbol, int] = {}
    for node in step.graph.nodes:
        for size in getattr(node.meta.get("val"), "shape", ()):
            symbol = expression(size)
            if isinstance(symbol, sympy.Symbol):
                found[symbol] = hinted(size)
    return found


def largest(step: StepGraph, limit_bytes: int, symbol: sympy.Symbol | None = None) -> int:
    """The largest value of `symbol` (the batch, say) with which the peak fits `limit_bytes`.

    Other symbols keep the values that the step was captured for; `symbol` may be left out if
    there is only one.

    Raises:
        OptionError: the step has no such symbol, or does not fit even at 1.
    """
    known = symbols(step)
    symbol = next(iter(known), None) if symbol is None and len(known) == 1 else symbol
    if symbol not in known:
        raise OptionError(f"the step has the dynamic sizes {sorted(map(str, known)) or 'none'}",
                          where="largest", do="capture it with dynamic shapes and name one of them")
    peak = peak_formula(step).subs({s: v for s, v in known.items() if s != symbol})

    def fits(value: int) -> bool:
        return peak.subs(symbol, value) <= limit_bytes

    if not fits(1):
        raise OptionError(f"at {symbol} = 1 the step still needs {int(peak.subs(symbol, 1))} bytes",
                          where=f"limit_bytes={limit_bytes}", do="give more bytes")
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
