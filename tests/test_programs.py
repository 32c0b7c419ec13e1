"""A budget and what lowering makes of the plan: on a step whose lowered peak is another than its schedule's."""

import dataclasses
import hashlib
from unittest import mock

import pytest
import torch
from torch import nn

from memopt_compile import explaining, programs


def captured():
    """The record of a small step, before any pass."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU())),
                          nn.Linear(32, 4)).double()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()

    x = torch.randn(512, 32, dtype=torch.float64)
    return explaining.planned(step, (x,), {"lowering": "inductor"}, captured_only=True)


@pytest.mark.parametrize("largest", [0.03, 0.3])
def test_a_smaller_budget_has_no_faster_step(largest):
    """Lowering adds up to the share `largest` of the transient bytes, less than nothing at times, and by no rule."""
    record, heads, tried = captured(), {}, []
    resident, beyond = record.before.resident_bytes, record.before.transient_peak_bytes

    def lowered(step, lowering):
        peak = programs.timeline(step, programs.workspace_of(step, lowering)).peak_bytes
        chance = hashlib.sha256(step.text().encode()).digest()[0] / 255
        tried.append(peak + int((chance - 0.2) * largest * beyond))
        return None, tried[-1]

    found = []
    with mock.patch.object(programs, "_lowered", lowered):
        for percent in range(105, 45, -5):
            limit = resident + percent * beyond // 100
            mine = dataclasses.replace(record, heads=heads)
            tried.clear()
            program = programs._within(limit, record.captured, mine)
            assert mine.predicted_peak_bytes == program.peak_bytes and mine.step.plan is program.plan
            if program.peak_bytes <= limit:
                found.append(program.plan.seconds if program.plan else 0.0)
                assert program.peak_bytes == tried[-1] and all(peak > limit for peak in tried[:-1])
            else:
                assert program.peak_bytes == min(tried)
            assert len(tried) <= 1 + programs.TRIES
    assert len(found) > 5 and found[-1] > 0
    if largest < programs.STRIDE / programs.RUNGS:
        assert found == sorted(found)
