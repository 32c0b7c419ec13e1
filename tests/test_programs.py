"""A budget and what lowering makes of the plan: on a step whose lowered peak is another than its schedule's."""

import dataclasses
import hashlib
import itertools
from unittest import mock

import pytest
import torch
from torch import nn

from memopt_compile import explaining, pipelines, programs
from memopt_compile.costs import workspace
from memopt_compile.liveness import timeline


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


@pytest.mark.parametrize(("most", "by", "seed"), [(0.039, 1, 0), (0.039, 1, 3), (0.3, 9, 0)])
def test_a_smaller_budget_has_no_faster_step(record, planned, most, by, seed):
    """The lowered peak is above the schedule's by up to the share `most` of the transient bytes, at random."""
    resident, beyond = record.before.resident_bytes, record.before.transient_peak_bytes
    rewritten, tried, seconds = pipelines.rewritten, [], []

    def remembered(step, options, lowering, costs, limit, *rest):
        if limit not in planned:
            planned[limit] = rewritten(step, options, lowering, costs, limit, *rest)
        return planned[limit]

    def lowered(step, record):
        peak = timeline(step, workspace(step, record.lowering)).peak_bytes
        tried.append(peak + int(hashlib.sha256(b"%d%d" % (seed, peak)).digest()[0] / 255 * most * beyond))
        return None, tried[-1]

    with (mock.patch.object(pipelines, "rewritten", remembered),
          mock.patch.object(programs, "_lowered", lowered)):
        for percent in range(105, 60, -by):
            limit, mine = resident + percent * beyond // 100, dataclasses.replace(record)
            tried.clear()
            program = programs._within(limit, record.captured, mine)
            assert mine.predicted_peak_bytes == program.peak_bytes and mine.step.plan is program.plan
            assert len(tried) <= 1 + programs.TRIES
            if program.peak_bytes <= limit:
                assert program.peak_bytes == tried[-1]
                seconds.append(program.plan.seconds if program.plan else 0.0)
            else:
                assert program.peak_bytes == min(tried) > limit
    assert seconds[-1] > 0 and (seconds == sorted(seconds) or most > programs.NEAR / programs.RUNGS)
