"""A budget and what lowering makes of the plan: on a step whose lowered peak is another than its schedule's."""

import dataclasses
import hashlib
import itertools
from unittest import mock

import pytest
import torch
from torch import nn

import memopt_compile as memopt
from memopt_compile import pipelines, programs
from memopt_compile.costs import workspace
from memopt_compile.liveness import timeline
from memopt_compile.reporting import explaining


def captured():
    """The record of a small step, before any pass."""
    torch.manual_seed(0)
    widths = 32, 48, 24, 40, 56, 16, 64, 8  # of different layers, so that there are many plans
    model = nn.Sequential(*(m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh()))).double()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()

    x = torch.randn(512, 32, dtype=torch.float64)
    return explaining.planned(step, (x,), {"lowering": "inductor"}, captured_only=True)


@pytest.fixture(scope="module")
def record():
    return captured()


@pytest.fixture(scope="module")
def planned():
    return {}  # what the passes make of the step, by limit


def walks(record, planned, peak_of, percents, within=programs._within, times=1):
    """For each budget, in per cent of the transient bytes: the limit in bytes, the program and the lowered peaks that
    were tried. `peak_of(schedule's peak)` stands for what lowering needs."""
    resident, beyond = record.before.resident_bytes, record.before.transient_peak_bytes
    rewritten, tried, asked = pipelines.rewritten, [], []

    def remembered(step, options, lowering, costs, limit, *rest):
        asked.append(limit)
        if limit not in planned:
            planned[limit] = rewritten(step, options, lowering, costs, limit, *rest)
        return planned[limit]

    def lowered(step, record):
        tried.append(peak_of(timeline(step, workspace(step, record.lowering)).peak_bytes))
        return None, tried[-1]

    with (mock.patch.object(pipelines, "rewritten", remembered),
          mock.patch.object(programs, "_lowered", lowered)):
        for percent in percents:
            limit, mine = resident + int(percent * beyond / 100), dataclasses.replace(record)
            mine.budget_bytes = limit
            tried.clear()
            asked.clear()
            program = within(limit, record.captured, mine)
            assert mine.predicted_peak_bytes == program.peak_bytes and mine.step.plan is program.plan
            assert len(tried) <= times * (1 + programs.TRIES) and mine.budget_bytes == limit
            assert len({*asked}) == len(asked)  # nothing is planned for twice, in a refusal neither
            yield limit, program, list(tried)


def share(seed, peak):
    """A number from 0 to 1 that follows from `peak`."""
    return hashlib.sha256(b"%d%d" % (seed, peak)).digest()[0] / 255


def seconds(program):
    return program.plan.seconds if program.plan else 0.0


@pytest.mark.parametrize(("most", "by", "seed"), [(0.039, 1, 0), (0.039, 1, 3), (0.3, 9, 0)])
def test_a_smaller_budget_has_no_faster_step(record, planned, most, by, seed):
    """The lowered peak is above the schedule's by up to the share `most` of the transient bytes, at random."""
    beyond, times = record.before.transient_peak_bytes, []
    for limit, program, tried in walks(record, planned, lambda peak: peak + int(share(seed, peak) * most * beyond),
                                       range(105, 60, -by)):
        if program.peak_bytes <= limit:
            assert program.peak_bytes == tried[-1]
            times.append(seconds(program))
        else:
            assert program.peak_bytes == min(tried) > limit
    assert times[-1] > 0 and (times == sorted(times) or most > programs.NEAR / programs.RUNGS)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.table(4)
def test_where_lowering_makes_less_of_some_plans_a_smaller_budget_has_no_larger_peak(record, planned, seed):
    """The lowered peak is from 2 hundredths of the transient bytes below the schedule's to 4 above, at random."""
    rung = record.before.transient_peak_bytes // programs.RUNGS
    less, more, times, peaks = programs.ABOVE - 1, programs.NEAR, [], []
    for limit, program, _ in walks(
            record, planned, lambda peak: peak + int(((less + more) * share(seed, peak) - less) * rung),
            [p / 4 for p in range(420, 288, -1)]):  # no plan needs less than 71 hundredths
        assert program.peak_bytes <= limit
        times.append(seconds(program))
        peaks.append(program.peak_bytes)
    assert times == sorted(times) and times[-1] > 0 and peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_as_a_budget_the_peak_that_a_refusal_names_gives_no_smaller_one(record, planned, seed):
    """The lowered peak is from 10 hundredths of the transient bytes below the schedule's to 4 above, at random."""
    resident, beyond = record.before.resident_bytes, record.before.transient_peak_bytes

    def peak_of(peak):
        return peak + int((0.14 * share(seed, peak) - 0.1) * beyond)

    for limit, program, tried in walks(record, planned, peak_of, (20, 40), programs._nearest, 1 + programs.NEARER / programs.TRIES):
        assert program.peak_bytes == min(tried) > limit
        named = 100 * (program.peak_bytes - resident + 0.5) / beyond
        ((_, again, _),) = walks(record, planned, peak_of, (named,), programs._nearest, 1 + programs.NEARER / programs.TRIES)
        assert again.peak_bytes == program.peak_bytes


@pytest.mark.parametrize("less", [5, 25])
def test_a_step_that_fits_once_lowered_has_no_plan(record, planned, less):
    """Lowering makes `less` hundredths of the transient bytes less of the step's own schedule, and of no other."""
    rung = record.before.transient_peak_bytes // programs.RUNGS
    own = programs._unplanned_peak(record.captured, record, {})
    percents = (105, 97, 96, 94, 92) if less == 5 else (96, 85, 76, 70)
    for limit, program, tried in walks(record, planned, lambda peak: peak - less * rung * (peak == own), percents):
        assert (program.plan is None) == (limit >= own - less * rung)
        assert program.peak_bytes == tried[-1] <= limit


@pytest.mark.inductor
def test_numbers_that_follow_from_a_second_batch_size():
    """Batch normalization divides by rows - 1: Inductor took no symbol with a value for a float."""
    args = [(torch.randn(rows, 8).double(), torch.arange(rows) % 4) for rows in (16, 6)]

    def trained(**options):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()

        fast = memopt.compile(step, **options) if options else step
        for each in args:
            fast(*each)
        report = memopt.report(fast) if options else None
        assert not report or report.measured_peak_bytes == report.predicted_peak_bytes <= report.budget_bytes
        return model.state_dict()

    torch.testing.assert_close(trained(memory_budget="1MiB", lowering="inductor"), trained())
