"""Steps below decorators: the report is of the user's function and its line, not of what is around it."""

import functools
from pathlib import Path

import pytest
import torch
from torch import nn

import memopt_compile as memopt

HERE = Path(__file__).name
DECORATORS = [torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad()]


def make(decorator):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    opt = torch.optim.AdamW(model.parameters())

    @decorator
    def step(x):
        loss = model(x).float().square().mean()
        if torch.is_grad_enabled():
            loss.backward()
            opt.step()
            opt.zero_grad()
        return loss.detach()

    return step, torch.randn(32, 16)


@pytest.mark.parametrize("decorator", DECORATORS, ids=lambda each: type(each).__name__)
def test_a_report_names_the_step_below_a_decorator_of_torch(decorator):
    step, x = make(decorator)
    line = f"{HERE}:{step.__wrapped__.__code__.co_firstlineno}"
    assert memopt.explain(step, x, lowering="eager").where == line
    compiled = memopt.compile(step, lowering="eager")
    compiled(x)
    assert memopt.report(compiled).where == memopt.report(step).where == line


def test_decorated_steps_are_told_apart():
    train, x = make(torch.enable_grad())

    @torch.no_grad()
    def evaluate(x):
        return x.sum()

    compiled = [memopt.compile(each, lowering="eager") for each in (train, evaluate)]
    for each in compiled:
        each(x)
    assert [memopt.report(each).where for each in (train, evaluate)] == [
        f"{HERE}:{each.__wrapped__.__code__.co_firstlineno}" for each in (train, evaluate)]


def test_a_decorator_of_the_users_is_theirs():
    def decorator(function):
        @functools.wraps(function)
        def around(x):
            return function(x)
        return around

    step, x = make(decorator)
    compiled = memopt.compile(step, lowering="eager")
    compiled(x)
    assert memopt.report(step).where == f"{HERE}:{decorator.__code__.co_firstlineno + 1}"


def test_what_has_no_code_is_no_step():
    with pytest.raises(memopt.OptionError, match="no training step"):
        memopt.report(functools.lru_cache(lambda x: x))


def test_an_error_names_the_step():
    step, x = make(torch.enable_grad())
    with pytest.raises(memopt.InfeasibleBudget) as refusal:
        memopt.explain(step, x, lowering="eager", memory_budget=1)
    assert HERE in str(refusal.value)
