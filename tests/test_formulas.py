"""The peak as a formula agrees with plans made for each size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt_compile as memopt
from memopt_compile import driver, records
from memopt_compile.formulas import largest, peak_formula, symbols
from memopt_compile.liveness import timeline
from memopt_compile.report import Report


def captured(batch: int, dynamic: bool):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.GELU(), nn.Linear(20, 4))
    opt = torch.optim.AdamW(model.parameters())

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    x, y = torch.randn(batch, 6), torch.randint(4, (batch,))
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(y, 0)
    torch.compile(step, backend=driver.backend, options={"lowering": "eager"})(x, y)
    return records.compilations(step.__code__)[-1]


def test_formula_equals_static_plans():
    step = captured(7, dynamic=True).step
    (symbol,) = symbols(step)
    formula = peak_formula(step)
    assert formula.free_symbols == {symbol}
    for batch in (33, 400, 4000):
        static = timeline(captured(batch, dynamic=False).step).peak_bytes
        assert int(formula.subs(symbol, batch)) == pytest.approx(static, rel=0.01)


def test_without_symbols_it_is_a_number():
    step = captured(8, dynamic=False).step
    assert peak_formula(step) == timeline(step).peak_bytes
    with pytest.raises(memopt.OptionError, match="none"):
        largest(peak_formula(step), symbols(step), 10**6)


def test_the_report_has_it():
    record = captured(7, dynamic=True)
    report = Report.of(record)
    assert report.sizes == symbols(record.step) and f"{report.formula} bytes, here" in str(report)


def test_largest_batch():
    step = captured(7, dynamic=True).step
    (symbol,) = symbols(step)
    formula = peak_formula(step)
    batch = largest(formula, symbols(step), 200_000)
    assert formula.subs(symbol, batch) <= 200_000 < formula.subs(symbol, batch + 1)
    with pytest.raises(memopt.OptionError, match="still needs"):
        largest(formula, symbols(step), 100)
