"""Losses whose operators are ours in a captured step: what they hold, and what they refuse."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt_compile as memopt


def compiled(loss):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6)).double()
    opt = torch.optim.AdamW(model.parameters())

    def step(x, *rest):
        value = loss(model(x), *rest)
        value.backward()
        opt.step()
        opt.zero_grad()
        return value.detach()

    return memopt.compile(step, lowering="eager"), model


@pytest.mark.parametrize("rows", [True, False])
def test_what_ctc_loss_holds_is_predicted(rows):
    """Its forward variables, of the longest target; where targets are one behind the other that is not known before."""
    def loss(found, targets, lengths):
        steps = found.log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(steps, targets if rows else targets.flatten(), [40, 40], lengths)

    run, _ = compiled(loss)
    run(torch.randn(2, 40, 8).double(), torch.randint(1, 6, (2, 30)), torch.tensor([30, 30]))
    found = memopt.report(run)
    assert found.predicted_peak_bytes >= found.measured_peak_bytes
    assert found.predicted_peak_bytes == found.measured_peak_bytes or not rows


def test_negative_variances_are_refused_and_nothing_changes():
    run, model = compiled(lambda found, sign: F.gaussian_nll_loss(found[:, :3], found[:, :3] + 1, sign * found[:, 3:].exp()))
    x = torch.randn(5, 8).double()
    run(x, torch.ones(()).double())
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="var has negative"):
        run(x, -torch.ones(()).double())
    assert memopt.report(run).kind == "step" and all(map(torch.equal, before, model.parameters()))
