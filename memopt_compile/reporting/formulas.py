"""The peak of a step as a formula in its dynamic sizes, and the largest batch that fits.

A step captured with dynamic shapes (another batch size on a later call, or
`torch._dynamo.mark_dynamic`) has symbols for sizes. Live bytes are sums of products of them, so
the peak is the maximum of polynomials; those that another is never below are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import sympy

from ..compat.sizes import at_most, polynomial, symbols_of_data
from ..compat.trace import hinted
from ..errors import OptionError
from ..liveness import lifetimes, live_bytes
from ..step_graph import StepGraph, each_nbytes


def peak_formula(step: StepGraph) -> sympy.Expr:
    """Peak bytes of `step` in its present order, inputs included, as a formula in its symbols.

    Workspace of library operators is not in it: that is measured for one size, not derived. Sizes of which only the
    data tell are at their largest.
    """
    life = lifetimes(step.graph, at_most)
    points = live_bytes(step.computing(), life)
    highest = _highest({sympy.expand(p) for p in points} or {sympy.Integer(0)})
    # Unevaluated, since sympy would compare each with each, which takes minutes for a few hundred.
    peak = sympy.Max(*highest, evaluate=False) if highest[1:] else highest[0]
    return sum(each_nbytes((p.meta.get("val") for p in step.placeholders), polynomial)) + peak


def _highest(points: set[sympy.Expr]) -> list[sympy.Expr]:
    """Those of `points` that no other is never below.

    For sizes from 1 on a ≥ b wherever, in the sizes less 1, no coefficient of a is below that of b.
    """
    from_one = {s: s + 1 for point in points for s in point.free_symbols}
    sums = [(point, sympy.expand(point.xreplace(from_one)).as_coefficients_dict()) for point in points]
    terms = {term: i for i, term in enumerate({t for _, terms in sums for t in terms})}
    rows = np.zeros((len(sums), len(terms)))
    for row, (_, coefficients) in zip(rows, sums):
        for term, coefficient in coefficients.items():
            row[terms[term]] = coefficient
    highest: list[int] = []
    for i in np.argsort(-rows.sum(1), kind="stable"):  # none is below a later one of another sum
        if not (rows[highest] >= rows[i]).all(1).any():
            highest.append(i)
    return [sums[i][0] for i in highest]


def symbols(step: StepGraph) -> dict[sympy.Symbol, int]:
    """The symbols of the step's sizes, with the values it was captured for."""
    found: dict[sympy.Symbol, int] = {}
    for node in step.graph.nodes:
        for size in getattr(node.meta.get("val"), "shape", ()):
            symbol = polynomial(size)
            if isinstance(symbol, sympy.Symbol) and not symbols_of_data(size):
                found[symbol] = hinted(size)
    return found


def largest(peak: sympy.Expr, sizes: Mapping[sympy.Symbol, int], limit_bytes: int,
            symbol: sympy.Symbol | None = None) -> int:
    """The largest value of `symbol` (the batch, say) with which `peak` fits `limit_bytes`.

    Other symbols keep the values of `sizes`; `symbol` may be left out if there is only one.

    Raises:
        OptionError: there is no such symbol, or nothing fits even at 1.
    """
    symbol = next(iter(sizes), None) if symbol is None and len(sizes) == 1 else symbol
    if symbol not in sizes:
        raise OptionError(f"the step has the dynamic sizes {sorted(map(str, sizes)) or 'none'}",
                          where="largest", do="capture it with dynamic shapes and name one of them")
    peak = peak.subs({s: v for s, v in sizes.items() if s != symbol})

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
