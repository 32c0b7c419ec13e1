"""A `torch.amp.GradScaler` in float16, captured: what docs/optimizers.md says of it. (Its loops are rows of tests/capture.)"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt_compile as memopt

TOO_LARGE = 2.0**22  # gradients of the first steps are beyond float16
WIDTH = 128


def scaled():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, WIDTH), *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)],
                          nn.Linear(WIDTH, 10))
    opt, scaler = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", TOO_LARGE, growth_interval=2)

    def step(x, y):
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        return loss.detach()

    return model, scaler, step


def batches(n=12):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(512, 32, generator=generator), torch.randint(10, (512,), generator=generator)) for _ in range(n)]


@pytest.mark.parametrize(("lowering", "budget"), [
    ("eager", None), ("eager", 0.75), pytest.param("inductor", 0.75, marks=pytest.mark.inductor)])
def test_is_what_eager_does(lowering, budget):
    """Steps that overflow are left out, and the scale moves alike. A budget is kept."""
    torch._dynamo.reset()
    (model, scaler, step), (expected, expected_scaler, eager) = scaled(), scaled()
    run, left_out = memopt.compile(step, lowering=lowering, memory_budget=budget), 0
    for x, y in batches():
        before = [p.detach().clone() for p in model.parameters()]
        torch.testing.assert_close(run(x, y), eager(x, y), rtol=1e-2, atol=1e-2)
        assert scaler.state_dict() == expected_scaler.state_dict()
        left_out += all(map(torch.equal, before, model.parameters()))
    report = memopt.report(run)
    assert report.kind == "step" and report.predicted_peak_bytes == report.measured_peak_bytes
    assert 0 < left_out < len(batches())
    if budget:
        assert report.measured_peak_bytes <= report.budget_bytes
    for p, q in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=2e-3)
