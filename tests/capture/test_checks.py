"""An assert on a tensor ends a captured step before anything is changed, as in eager, or the step is not captured.

PYTEST_DONT_REWRITE: Dynamo knows an assert by its bytecode.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memopt_compile as memopt
from memopt_compile import records
from memopt_compile.checks import is_check
from memopt_compile.step_graph import mutated_args


def stepped(check_gradients, **options):
    """What a step on a batch that is not finite raises, and what it has changed."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(2) for m in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU())))
    opt = torch.optim.AdamW(model.parameters())

    def step(x):
        for part in x.chunk(2):
            loss = model(part).square().mean()
            if not check_gradients:
                assert torch.isfinite(loss), "the loss"
            loss.backward()
        if check_gradients:
            norms = torch.zeros(len(list(model.parameters())))
            for i, p in enumerate(model.parameters()):
                norms[i] = p.grad.norm()
            assert torch.isfinite(norms.norm()), "the norm"
        opt.step()
        opt.zero_grad()
        return loss.detach()

    run = memopt.compile(step, **options)
    for _ in range(2):
        run(torch.randn(64, 8))
    held = [*model.parameters(), *(t for each in opt.state.values() for t in each.values())]
    before = [t.detach().clone() for t in held]
    with pytest.raises((RuntimeError, AssertionError), match="the"):
        run(torch.cat([torch.randn(32, 8), torch.full((32, 8), float("inf"))]))
    assert all(map(torch.equal, before, held))
    return records.compilations(step.__code__)


@pytest.mark.parametrize("options", [{"lowering": "eager"}, {"lowering": "eager", "memory_budget": 0.8}, pytest.param(
    {"lowering": "inductor"}, marks=pytest.mark.inductor)], ids=["eager", "budget", "inductor"])
def test_of_the_loss(options):
    """Every write to what stays is behind all checks, wherever passes have moved either."""
    found = stepped(False, **options)[-1]
    nodes = list(found.step.computing())
    checks = [i for i, node in enumerate(nodes) if is_check(node)]
    writes = [i for i, node in enumerate(nodes) if any(a.op == "placeholder" for a in mutated_args(node))]
    assert found.kind == "step" and len(checks) == 2 and max(checks) < min(writes)


def test_of_gradients(caplog):
    found = stepped(True, lowering="eager")[-1]
    assert found.kind == "ordinary" and "a check of what gradients made" in caplog.text
    assert caplog.text.count("not captured whole") == 1 and "the norm" in caplog.text
