"""Planning again during training."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "passes"))
from graphs import ordinary_step  # noqa: E402

import memopt_compile as memopt  # noqa: E402
from memopt_compile import programs, records  # noqa: E402
from memopt_compile.backends import inductor  # noqa: E402
from memopt_compile.memory_plan import MemoryPlan  # noqa: E402
from memopt_compile.planning.adaptation import (
    OUTLIER_COLUMNS,
    WATCHED,
    Adaptive,
    Program,
    Watched,
    level,
)
from memopt_compile.reporting import explaining  # noqa: E402

PLAN = MemoryPlan(0, 0, 0.0, 0.0, (), frozenset())


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 700), st.integers(32, 200), st.integers(0, 20), st.integers(0, 1000))
def test_outliers_are_columns_far_above_the_mean(rows, columns, heavy, seed):
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(rows, columns, generator=generator)
    value[:, :heavy] *= 50
    sums = value.abs().sum(0).double()
    far = (sums - sums.mean()) / sums.std(correction=0)
    if not ((far - 3).abs() < 1e-3).any():
        assert int(OUTLIER_COLUMNS(value)) == int((far > 3).sum())


@pytest.mark.parametrize(("outliers", "expected"), [(0, "int4"), (1, WATCHED), (4, WATCHED), (5, "int8")])
def test_format_by_outliers(outliers, expected):
    assert level(outliers, 128) == expected


class Steps:
    """Programs that note how they are called, with the outliers that the next watched call will see."""

    def __init__(self, watched=None):
        self.counts, self.calls, self.asked, self.fits = [0], "", [], True
        self.watched = watched or {"a": Watched(128, 1000)}
        self.adaptive = Adaptive(self.program(), self.again, "train.py:3", [])

    def program(self):
        def run(inputs):
            self.calls += "."
            return (1.0,)

        def watching(inputs):
            self.calls += "w"
            return (1.0, *map(torch.tensor, self.counts))

        return Program(run, PLAN, 100, watching, self.watched)

    def again(self, formats):
        self.asked.append(dict(formats))
        return self.program() if self.fits else None

    def run(self, steps, *counts):
        self.counts = list(counts)
        assert all(self.adaptive([]) == (1.0,) for _ in range(steps))


def test_watched_ever_less_often():
    steps = Steps()
    steps.run(40, 1)
    assert [i + 1 for i, kind in enumerate(steps.calls) if kind == "w"] == [1, 2, 4, 8, 16, 32]
    assert steps.asked == [] and steps.adaptive.history == []


def test_gentler_at_once_coarser_when_it_lasts():
    steps = Steps()
    steps.run(3, 1)
    steps.run(1, 100)
    assert steps.asked == [{"a": "int8"}] and steps.calls == "ww.w"
    steps.run(14, 0)  # watched on the first, third and seventh step after the change
    assert len(steps.asked) == 1
    steps.run(1, 0)
    assert steps.asked == [{"a": "int8"}, {"a": "int4"}]
    assert [h.after for h in steps.adaptive.history] == [4, 19]
    assert "after step 4: 1 activations changed, peak 100 B" in str(steps.adaptive.history[0])


@given(st.lists(st.booleans(), min_size=400, max_size=400))
def test_what_flickers_is_planned_again_ever_less_often(outlier):
    """Each time that a coarser format came too early, twice as many steps have to agree on it."""
    steps = Steps()
    for one in outlier:
        steps.run(1, int(one))
    gentler = sum(form["a"] == WATCHED for form in steps.asked)
    assert len(steps.asked) <= 2 * gentler + 1 <= 15
    assert steps.calls.count("w") <= 120


def test_a_plan_that_does_not_fit_is_not_taken():
    steps = Steps()
    steps.fits, before = False, steps.adaptive.program
    steps.run(1, 100)
    assert steps.adaptive.program is before
    assert "the one before stays" in str(steps.adaptive.history[0])


def test_what_hardly_matters_waits():
    steps = Steps({"large": Watched(128, 10_000), "small": Watched(128, 400), "other": Watched(128, 400)})
    steps.run(1, 1, 100, 1)
    assert steps.asked == []
    steps.run(1, 1, 100, 100)
    assert steps.asked == [{"small": "int8", "other": "int8"}] and steps.adaptive.history[0].changed == 2


def test_training_goes_on_through_plans():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.GELU())), nn.Linear(64, 4))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(2048, 64), torch.arange(2048) % 4
    heavy = x.clone()
    heavy[:, ::10] *= 20
    compiled = memopt.compile(ordinary_step(model, opt), memory_budget=0.65, compress="int4", recompute=False, adapt=True,
                              lowering="eager", verify=True)
    losses, peaks, errors = [], [], []
    for batch in (*[x] * 4, *[heavy] * 3, x):
        losses.append(float(compiled(batch, y)))
        report = memopt.report(compiled)
        peaks.append((report.predicted_peak_bytes, report.measured_peak_bytes))
        errors.append(report.gradient_error)
    assert all(predicted <= report.budget_bytes for predicted, _ in peaks)
    assert all(measured in (None, predicted) for predicted, measured in peaks) and peaks[0][1]
    assert len(report.history) >= 2 and all(h.plan for h in report.history)
    assert "planned again" in str(report)
    compared = 1 + sum(change.after < 8 for change in report.history)  # in the first step of each plan
    assert len({*errors}) == compared and all(errors[change.after - 1] != errors[change.after]
                                              for change in report.history if change.after < 8)
    assert {int(state["step"]) for state in opt.state.values()} == {8}
    assert losses[3] < losses[0]


def test_adapting_needs_something_to_adapt():
    with pytest.raises(memopt.OptionError, match="adapt") as refusal:
        memopt.Options(adapt=True, memory_budget=0.5)
    assert "compress='int4'" in str(refusal.value)


@pytest.mark.inductor
def test_pieces_of_plans_before_are_used_again():
    """Another format compiles the pieces that pack and unpack it; the plan before comes back with nothing compiled."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU())), nn.Linear(64, 4))
    step = ordinary_step(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    options = {"memory_budget": 1.0, "compress": "int4", "recompute": False, "lowering": "inductor"}
    record = explaining.planned(step, (torch.randn(2048, 64), torch.arange(2048) % 4), options, captured_only=True)
    record.budget_bytes = record.before.resident_bytes

    def planned(formats):
        with records.planning():  # lowered, without the C++ compiler
            return programs._within(record.budget_bytes, record.captured, replace(record), formats)

    record.budget_bytes = planned({}).peak_bytes  # the smallest, so that all of them have to pack as much
    inductor.forget()
    first = planned({})
    other = planned({first.plan.packed[0][0]: "int4"})
    assert other.plan.packed != first.plan.packed and 0 < len(other.run.compiled) < other.run.distinct
    again = planned({})
    assert again.plan.packed == first.plan.packed and not again.run.compiled
    assert max(each.peak_bytes for each in (first, other, again)) <= record.budget_bytes


@pytest.mark.inductor
def test_a_refusal_counts_the_numbers_that_the_watched_step_returns():
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(64, 64), nn.GELU())), nn.Linear(64, 4))
    step = ordinary_step(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    args = torch.randn(2048, 64), torch.arange(2048) % 4
    asked = {"compress": "int4", "recompute": False, "adapt": True, "lowering": "inductor"}
    with pytest.raises(memopt.InfeasibleBudget) as refusal:
        memopt.explain(step, *args, memory_budget="1MiB", **asked)
    smallest = refusal.value.smallest_peak_bytes
    assert memopt.explain(step, *args, memory_budget=smallest, **asked).predicted_peak_bytes == smallest
