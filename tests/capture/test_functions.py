"""What functions with a rule of their own say and raise, beside their numbers (`rows_functions`)."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings

import pytest
import torch
from torch import nn

import memopt_compile


def compiled():
    torch._dynamo.reset()
    model = nn.Linear(3, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        warnings.warn("told by the step", FutureWarning, stacklevel=1)
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return model, step, torch.compile(step, backend="memopt", options={"lowering": "eager"})


def test_a_warning_names_the_line_that_eager_would_name():
    _, step, fast = compiled()
    told = []
    for each in (step, fast):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            step.__globals__.pop("__warningregistry__", None)
            each(torch.ones(2, 3))
            each(torch.ones(2, 3))
        (one,) = [w for w in caught if "told by the step" in str(w.message)]
        told.append((one.category, one.filename, one.lineno))
    assert told[0] == told[1]


def test_a_warning_that_is_an_error_is_raised_as_in_eager(caplog):
    model, _, fast = compiled()
    before = model.weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        with pytest.raises(FutureWarning, match="told by the step"):
            fast(torch.ones(2, 3))
    assert torch.equal(before, model.weight)


def test_a_long_recurrence_is_said(caplog):
    torch._dynamo.reset()
    network = nn.GRU(3, 3)

    def step(x):
        network(x)[0].sum().backward()

    with caplog.at_level(logging.WARNING, "memopt_compile"):
        torch.compile(step, backend="memopt", options={"lowering": "eager"})(torch.ones(200, 1, 3))
    (line,) = [r.getMessage() for r in caplog.records if "not captured whole" in r.getMessage()]
    assert "200 cells" in line and "at most 128" in line and "test_functions.py" in line
    assert network.weight_hh_l0.grad is not None


def test_a_size_that_a_tensor_tells_is_a_number_read_off_it(caplog):
    """Also where it is an operator that asks for it, of which torch names one that nobody has written."""
    torch._dynamo.reset()
    model = nn.Linear(3, 8)

    def step(x):
        found = model(x)
        best = found.argmax(-1)
        (found[:, :4] * torch.nn.functional.one_hot(best, max(best.max() + 1, 4))[:, :4]).sum().backward()

    with caplog.at_level(logging.WARNING, "memopt_compile"):
        torch.compile(step, backend="memopt", options={"lowering": "eager"})(torch.ones(2, 3))
    (line,) = [r.getMessage() for r in caplog.records if "not captured whole" in r.getMessage()]
    assert "a number is read off a tensor" in line and "one_hot" in line and model.weight.grad is not None


def test_a_break_behind_a_whole_step_is_not_said(caplog):
    """Also where it is in a function that the step calls, which torch then compiles by itself."""
    torch._dynamo.reset()
    model, best = nn.Linear(3, 1), [1e9]
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def watch(loss):
        if loss.item() < best[0]:
            best[0] = loss.item()

    @torch.no_grad()
    def check(loss):  # Dynamo leaves it to Python
        with contextlib.suppress(ValueError):
            if loss.isnan().any():
                raise ValueError

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        watch(loss)
        check(loss)

    fast = torch.compile(step, backend="memopt", options={"lowering": "eager"})
    with caplog.at_level(logging.WARNING, "memopt_compile"):
        fast(torch.ones(2, 3))
    assert best[0] < 1e9 and memopt_compile.report(fast).kind == "step"
    assert not [r for r in caplog.records if "not captured whole" in r.getMessage()]


def test_an_lstm_in_float32():
    """Where torch's own choice for the trace is a kernel that ends the process in backward."""
    torch._dynamo.reset()

    def train(compile):
        torch.manual_seed(0)
        network = nn.LSTM(3, 4)
        opt = torch.optim.SGD(network.parameters(), lr=0.1)

        def step(x):
            loss = network(x)[0].square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        step = compile(step)
        return torch.stack([step(torch.ones(5, 2, 3)).detach() for _ in range(4)])

    fast = train(lambda step: torch.compile(step, backend="memopt", fullgraph=True,
                                            options={"lowering": "eager"}))
    torch.testing.assert_close(train(lambda step: step), fast)


def test_floats_of_modules_may_change_too():
    """With ``dynamic=True`` batch normalization's eps is a symbol, and its form called itself without end."""
    norm = torch.nn.BatchNorm1d(8).double()
    twin = copy.deepcopy(norm)
    x = torch.randn(24, 8).double()

    def step(norm, x):
        loss = norm(x).pow(3).sum()
        loss.backward()
        return loss.detach()

    torch._dynamo.reset()
    fast = torch.compile(step, backend="memopt", dynamic=True, options={"lowering": "eager"})
    torch.testing.assert_close(fast(norm, x), step(twin, x))
    assert memopt_compile.report(fast).kind == "step"
    torch.testing.assert_close([*norm.buffers(), norm.weight.grad], [*twin.buffers(), twin.weight.grad])
