"""The peak as a formula agrees with plans made for each size."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt_compile as memopt
from memopt_compile import driver, records
from memopt_compile.liveness import timeline
from memopt_compile.report import Report
from memopt_compile.reporting.formulas import largest, peak_formula, symbols

SPEC = importlib.util.spec_from_file_location(
    "example_models", Path(__file__).parents[1] / "examples" / "models.py")
models = sys.modules[SPEC.name] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(models)


def step_of(model: nn.Module):
    opt = torch.optim.AdamW(model.parameters())

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return step


def captured(batch: int, dynamic: bool):
    torch._dynamo.reset()
    torch.manual_seed(0)
    step = step_of(nn.Sequential(nn.Linear(6, 20), nn.GELU(), nn.Linear(20, 4)))
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


def tokens(batch: int, sequence: int) -> torch.Tensor:
    return torch.randint(65, (batch, sequence + 1))


def gpt(batch: int, sequence: int, dynamic: bool = False):
    """A step of the README's GPT, what it trains, a function that says what was compiled of it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = models.GPT(models.GPTConfig(65, layers=1, width=32, context=64))
    opt = torch.optim.AdamW(model.parameters())

    def step(text):
        logits = model(text[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    text = tokens(batch, sequence)
    if dynamic:
        torch._dynamo.mark_dynamic(text, [0, 1])
    run = torch.compile(step, backend=driver.backend, options={"lowering": "eager"})
    run(text)
    return run, (model, opt), partial(records.compilations, step.__code__)


@pytest.mark.slow
def test_formula_in_batch_and_sequence_length():
    """Of a GPT: what its step, compiled for another size, allocates, and what a plan for that size says."""
    run, trained, compiled = gpt(6, 48, dynamic=True)
    known = len(compiled())
    formula, sizes = peak_formula(compiled()[-1].step), symbols(compiled()[-1].step)
    batch, sequence = sorted(sizes, key=sizes.get)
    assert (sizes[batch], sizes[sequence]) == (6, 49)
    shapes = [(4, 64), (16, 16), (48, 60), (128, 5)]
    expected = [int(formula.subs({batch: b, sequence: t + 1})) for b, t in shapes]
    for shape, peak_bytes in zip(shapes, expected):
        measured = memopt.measure(run, tokens(*shape), resident=trained)
        assert measured.peak_bytes == pytest.approx(peak_bytes, rel=0.01)
    assert len(compiled()) == known  # nothing was compiled for them
    for shape, peak_bytes in zip(shapes[:1], expected):
        assert timeline(gpt(*shape)[2]()[-1].step).peak_bytes == pytest.approx(peak_bytes, rel=0.01)

    fits = largest(formula, {**sizes, sequence: 33}, 4 * 2**20, batch)
    below, above = (timeline(gpt(fits + more, 32)[2]()[-1].step).peak_bytes for more in (0, 1))
    assert below <= 4 * 2**20 < above


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


def next_tokens():
    text = torch.randint(65, (8 * 1024 + 1,))
    return text[:-1], text[1:]


def one_array():
    return torch.randint(65, (2, 8 * 1024)).unbind()


def flat_parameters(model):
    """As who sends them to other ranks at once has them."""
    flat, at = torch.cat([p.detach().flatten() for p in model.parameters()]), 0
    for p in model.parameters():
        p.data = flat[at:at + p.numel()].view_as(p)
        at += p.numel()


@pytest.mark.parametrize(("batch", "change"), [(next_tokens, lambda model: ()), (one_array, flat_parameters)])
def test_inputs_that_share_a_storage_have_it_once(batch, change):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Embedding(65, 32), nn.Linear(32, 65))
    change(model)
    step = step_of(model)
    compiled = memopt.compile(step, lowering="eager")
    compiled(*batch())
    report = memopt.report(compiled)
    assert abs(report.predicted_peak_bytes - report.measured_peak_bytes) <= 16  # a rate that is a number
    assert peak_formula(records.compilations(step.__code__)[-1].step) == report.predicted_peak_bytes
