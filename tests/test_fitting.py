"""The largest batch that fits: by plans of exact sizes, with and without a formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt_compile as memopt
from memopt_compile.reporting.fitting import fit, resized


def training(branches: bool = False, layers: int = 1):
    torch.manual_seed(0)
    hidden = [m for _ in range(layers - 1) for m in (nn.Linear(20, 20), nn.GELU())]
    model = nn.Sequential(nn.Linear(6, 20), nn.GELU(), *hidden, nn.Linear(20, 4))
    opt = torch.optim.AdamW(model.parameters())

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        if branches and x.shape[0] == 12:  # asks for the size, which is then no longer dynamic
            loss = loss + 0.0
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return step, (torch.randn(12, 6), torch.randint(4, (12,)))


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("multiple_of", [1, 10])
@pytest.mark.table(4)
def test_fits_and_the_next_does_not(branches, multiple_of):
    step, args = training(branches)
    lines: list[str] = []
    found = fit(step, args, "100KiB", multiple_of=multiple_of, progress=lines.append,
                lowering="eager")
    assert found.peak_bytes[found.batch] <= 100 * 1024 < found.peak_bytes[found.batch + multiple_of]
    assert found.batch % multiple_of == 0 and (found.formula is None) is branches
    x = torch.randn(found.batch, 6)
    exact = memopt.explain(step, x, x.argmax(1) % 4, lowering="eager")
    assert exact.predicted_peak_bytes == found.peak_bytes[found.batch]
    assert len(lines) == len(found.peak_bytes) <= 8


def test_fewer_than_the_example():
    step, args = training()
    assert fit(step, args, 4800, lowering="eager").batch == 8


@pytest.mark.parametrize(("memory", "unit", "unbudgeted"), [("64KiB", 8, 80), ("54KiB", 64, 0)])
@pytest.mark.table(4)
def test_a_budget_takes_a_larger_batch(memory, unit, unbudgeted):
    step, args = training(layers=5)
    found = fit(step, args, memory, multiple_of=unit, budgeted=True, lowering="eager")
    assert found.batch > found.unbudgeted == unbudgeted
    assert found.peak_bytes[found.batch] <= found.limit_bytes < found.peak_bytes[found.batch + unit]
    assert f"batch {found.batch} fits" in str(found) and f"{found.unbudgeted} without" in str(found)
    compiled = memopt.compile(step, lowering="eager", memory_budget=memory)
    compiled(*resized(args, 12, found.batch))
    assert memopt.report(compiled).measured_peak_bytes == found.peak_bytes[found.batch]
    with pytest.raises(memopt.InfeasibleBudget):
        compiled(*resized(args, 12, found.batch + unit))


def test_what_runs_is_what_was_promised():
    step, args = training()
    found = fit(step, args, "64KiB", lowering="eager")
    compiled = memopt.compile(step, lowering="eager", memory_budget="64KiB")
    rows = torch.arange(found.batch) % 12
    compiled(*(a[rows] for a in args))
    assert memopt.report(compiled).measured_peak_bytes <= 64 * 1024


@pytest.mark.parametrize(("args", "memory", "problem"), [
    (None, 1000, "still needs"), ((3,), "1MiB", "no argument has a batch"),
    (None, "6", "cannot be"),
])
def test_refusals(args, memory, problem):
    step, example = training()
    with pytest.raises(memopt.OptionError, match=problem):
        fit(step, args or example, memory, lowering="eager")


def test_the_bytes_are_said_once():
    step, args = training()
    with pytest.raises(memopt.OptionError, match="budgeted=True"):
        fit(step, args, "1MiB", memory_budget="1MiB")
