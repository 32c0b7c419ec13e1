"""A check of data raises what eager raises, and leaves behind what eager leaves; if it can, in a captured step.

PYTEST_DONT_REWRITE: an assert is known by its bytecode.
"""

from __future__ import annotations

import contextlib
import io
import math
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt_compile as memopt
from memopt_compile import records
from memopt_compile.checks import is_check
from memopt_compile.step_graph import mutated_args


class Bad(Exception):
    pass


def raised_by_a_function(loss):
    if not torch.isfinite(loss):
        raise Bad(f"{loss.item()} of a function")


class Trainer:
    """Steps that look at their loss, each in its own way, before or behind backward."""

    def __init__(self, look):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)).double()
        self.opt = torch.optim.AdamW(self.model.parameters())
        self.look, self.calls, self.losses, self.printed = look, 0, [], io.StringIO()

    def exits(self, loss):
        value = loss.item()
        if not math.isfinite(value):
            print(f"Loss is {value}, stopping", file=self.printed)
            sys.exit(self.calls)

    def asserts(self, loss):
        assert torch.isfinite(loss), f"loss {loss}"

    def is_itself(self, loss):
        value = loss.item()
        if value != value:
            raise Bad(value)

    def is_not_too_large(self, loss):
        self.losses.append(loss.item())
        if len(self.losses) > 1 and not self.losses[-1] < 1e3:
            raise Bad(self.losses)

    def calls_a_function(self, loss):
        raised_by_a_function(loss)

    def takes_the_other_side(self, loss):
        if torch.isfinite(loss).item():
            self.calls += 1
        else:
            raise Bad(self.calls)

    def says_it_in_two_ways(self, loss):
        with contextlib.nullcontext():
            if np.isnan(loss.item()):
                if self.calls > 3:
                    print("late", file=self.printed)
                else:
                    print("early", file=self.printed)
                raise Bad

    def catches(self, loss):
        with contextlib.suppress(ZeroDivisionError):
            try:
                raised_by_a_function(loss)
            except Bad:
                self.losses.append(self.calls)

    def knows_infinity(self, loss):
        self.losses.append(loss.item() == float("inf") or loss.item() != loss.item())

    def step(self, x, *, scale=1.0):
        self.calls += 1
        for i, part in enumerate(x.chunk(2)):
            loss = scale * self.model(part).square().mean()
            if self.look not in ("gradients", "clipped", "behind"):
                getattr(self, self.look)(loss)
            if self.look == "exits" and not i:  # up to here there are the gradients of the last step
                self.opt.zero_grad()
            loss.backward()
        if self.look == "gradients":
            norms = torch.zeros(len(list(self.model.parameters())))
            for i, p in enumerate(self.model.parameters()):
                norms[i] = p.grad.norm()
            assert torch.isfinite(norms.norm()), "the norm"
        if self.look == "clipped":
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, error_if_nonfinite=True)
        self.opt.step()
        if self.look == "behind":
            self.exits(loss)
        if self.look != "exits":
            self.opt.zero_grad()
        return loss.detach()


def trained(look, compiled, **options):
    """What four calls return or raise, one of the last two on a batch that is not finite, and everything that they change."""
    torch._dynamo.reset()
    trainer, seen = Trainer(look), []
    run = memopt.compile(trainer.step, **options) if compiled else trainer.step
    for call in range(4):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(call)).double()
        if look == "exits" and call == 3:
            x[1, 1] = math.nan
        elif look != "exits" and call == 2:
            x[6, 1] = math.nan
        try:
            seen.append(run(x, scale=2.0))
        except (Exception, SystemExit) as error:
            seen.append((type(error), *error.args))
    model, states = trainer.model, trainer.opt.state.values()
    kept = [*model.state_dict().values(), *(t for state in states for t in state.values()),
            *(p.grad for p in model.parameters()), torch.rand(3)]
    return seen, kept, [trainer.calls, trainer.losses, trainer.printed.getvalue()], run


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.allclose(a.double(), b.double(), rtol=1e-9, atol=1e-12, equal_nan=True)
    return str(a) == str(b)  # nan is nan


WHOLE = ("exits", "asserts", "is_itself", "is_not_too_large", "calls_a_function", "takes_the_other_side",
         "says_it_in_two_ways", "gradients", "clipped", "behind")


@pytest.mark.parametrize("look", [*WHOLE, "catches", "knows_infinity"])
@pytest.mark.table(4)
def test_as_eager(look, caplog):
    expected, got = (trained(look, compiled, lowering="eager") for compiled in (False, True))
    for a, b in zip(expected[:3], got[:3]):
        assert all(map(equal, a, b)) and len(a) == len(b)
    report = memopt.report(got[3])
    assert (report.kind == "step" and "not captured whole" not in caplog.text) is (look in WHOLE)
    assert any(isinstance(each, tuple) for each in got[0]) is (look in WHOLE)


@pytest.mark.parametrize("options", [{"lowering": "eager"}, {"lowering": "eager", "memory_budget": 0.95}, pytest.param(
    {"lowering": "inductor"}, marks=[pytest.mark.inductor, pytest.mark.thorough])], ids=["eager", "budget", "inductor"])
def test_nothing_changes_before_a_check(options):
    """Every write to what stays is behind all checks, wherever passes have moved either."""
    seen, _, _, run = trained("exits", True, **options)
    assert seen[3] == (SystemExit, 4)
    found = records.compilations(Trainer.step.__code__)[-1]
    nodes = list(found.step.computing())
    checks = [i for i, node in enumerate(nodes) if is_check(node)]
    writes = [i for i, node in enumerate(nodes) if any(a.op == "placeholder" for a in mutated_args(node))]
    assert found.kind == "step" and len(checks) == 2 and max(checks) < min(writes)


@pytest.mark.inductor
def test_not_captured_where_writes_may_come_first(caplog):
    """One piece has an order of Inductor's own: the graph ends at the branch, as ever."""
    torch._dynamo.reset()
    trainer = Trainer("exits")
    run = memopt.compile(trainer.step, lowering="inductor", pieces=False)
    with contextlib.suppress(SystemExit):
        for x in (torch.randn(8, 8).double(), torch.full((8, 8), math.nan).double()):
            run(x)
    assert trainer.printed.getvalue() == "Loss is nan, stopping\n" and "not captured whole" in caplog.text


@pytest.mark.parametrize("region", [False, True])
def test_variables_of_the_function_around_are_changed(region, caplog):
    """By the call that raises as well. Within a checkpoint, which runs again, nothing is checked by the graph."""
    counts = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model, count = nn.Linear(4, 4), 0

        def forward(x, model=model):
            y = model(x)
            if torch.isnan(y).any():
                raise Bad("here")
            return y

        def step(x):
            nonlocal count
            count += 1
            (checkpoint(forward, x, use_reentrant=False) if region else forward(x)).sum().backward()

        run = memopt.compile(step, lowering="eager") if compiled else step
        for value in (1.0, math.nan, 1.0):
            with contextlib.suppress(Bad):
                run(torch.full((2, 4), value))
        counts.append(count)
    assert counts == [3, 3] and ("not captured whole" in caplog.text) is region
