"""Losses in float16, scaled by hand inside the step, as docs/optimizers.md has it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt_compile as memopt

GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2
TOO_LARGE = 2.0**22  # gradients of the first steps are beyond float16


def made(kind, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))
    return model, kind(model.parameters(), lr=1e-2, **settings)


def loss_of(model, x, y):
    with torch.autocast("cpu", torch.float16):
        return F.cross_entropy(model(x), y)


def batches(n=12):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 32, generator=generator), torch.randint(10, (16,), generator=generator)) for _ in range(n)]


def scaled_by_scaler():
    model, opt = made(torch.optim.AdamW)
    scaler = torch.amp.GradScaler("cpu", TOO_LARGE, GROWTH, BACKOFF, INTERVAL)

    def step(x, y):
        loss = loss_of(model, x, y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        return loss.detach()

    return model, scaler.get_scale, step


def scaled_by_hand():
    model, opt = made(memopt.optim.AdamW, skip_nonfinite=True)
    scale, good = torch.tensor(TOO_LARGE), torch.tensor(0)

    def step(x, y):
        loss = loss_of(model, x, y)
        (loss * scale).backward()
        finite = torch.stack([p.grad.isfinite().all() for p in model.parameters()]).all()
        for p in model.parameters():
            p.grad.mul_(torch.where(finite, 1 / scale, float("nan")))
        opt.step()
        opt.zero_grad()
        good.copy_(torch.where(finite, good + 1, 0))
        scale.mul_(torch.where(finite, torch.where(good % INTERVAL == 0, GROWTH, 1.0), BACKOFF))
        return loss.detach()

    return model, lambda: float(scale), step


@pytest.mark.parametrize("budget", [None, 0.999])
def test_by_hand_is_what_a_scaler_does(budget):
    """Steps that overflow are left out, and the scale moves alike."""
    torch._dynamo.reset()
    (model, scale, step), (expected, expected_scale, eager) = scaled_by_hand(), scaled_by_scaler()
    run, left_out = memopt.compile(step, lowering="eager", memory_budget=budget), 0
    for x, y in batches():
        before = [p.detach().clone() for p in model.parameters()]
        torch.testing.assert_close(run(x, y), eager(x, y), rtol=1e-3, atol=1e-3)
        assert scale() == expected_scale()
        left_out += all(map(torch.equal, before, model.parameters()))
    assert memopt.report(run).kind == "step" and 0 < left_out < len(batches())
    for p, q in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
