"""Gradients of gradients, where a step is cut in pieces or only its model is compiled."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from memopt_compile import CaptureError

WIDTH = 6
PLACES = ["before the model", "before the slope", "before the loss", "before backward", "nowhere"]


def critic(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), *middle, nn.Tanh(), nn.Linear(8, 1))


def compiled(function, lowering: str = "eager"):
    return torch.compile(function, backend="memopt", options={"lowering": lowering})


def trained(build, way) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = critic().double()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = build(model, opt, way)
    losses = [step(torch.randn(5, WIDTH, dtype=torch.float64)).detach() for _ in range(4)]
    return [*losses, *(p.detach() for p in model.parameters())]


def assert_as_eager(build) -> None:
    torch.testing.assert_close(trained(build, compiled), trained(build, lambda f: f), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("place", PLACES)
def test_a_step_cut_anywhere(place):
    """A print, which ends Dynamo's graph, on each side of the gradient that is differentiated again."""
    def build(model, opt, way):
        def step(x):
            x.requires_grad_()
            cut(place == PLACES[0])
            out = model(x)
            cut(place == PLACES[1])
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            cut(place == PLACES[2])
            loss = out.mean() + (slope.norm(dim=1) - 1).square().mean()
            cut(place == PLACES[3])
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        return way(step)

    assert_as_eager(build)


def cut(here: bool) -> None:
    if here:
        torch._dynamo.graph_break()


@pytest.mark.parametrize("kept", [True, False], ids=["retain_graph", "create_graph"])
def test_a_graph_that_is_gone_through_again_behind_the_cut(kept):
    def build(model, opt, way):
        def step(x):
            out = model(x).square().mean()
            gradients = torch.autograd.grad(out, list(model.parameters()), retain_graph=kept or None,
                                            create_graph=not kept)
            norm = sum(g.square().sum() for g in gradients)
            torch._dynamo.graph_break()
            (out * norm).backward()
            opt.step()
            opt.zero_grad()
            return out

        return way(step)

    assert_as_eager(build)


def test_a_gradient_returned_for_somebody_elses_loss():
    def build(model, opt, way):
        def slope_of(x):
            x = x.clone().requires_grad_()
            return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]

        slope_of = way(slope_of)

        def step(x):
            loss = (slope_of(x).norm(dim=1) - 1).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            return loss

        return step

    assert_as_eager(build)


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_the_model_alone(lowering):
    def build(model, opt, way):
        model = way(model) if way is not compiled else compiled(model, lowering)

        def step(x):
            x = x.requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            loss = model(x * 2).mean() + (slope.norm(dim=1) - 1).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            return loss

        return step

    assert_as_eager(build)


def test_a_backward_that_runs_twice():
    """So the first may write into nothing that the second reads."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Unflatten(1, (1, WIDTH)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(),
                          nn.LayerNorm(16), nn.Dropout(0.3), nn.Linear(16, 8), nn.Softmax(dim=1), nn.GELU()).double()
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    found = []
    for each in (model, compiled(model)):
        torch.manual_seed(1)
        each(x).sum().backward()  # compiled for one that runs once
        loss = each(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([p.grad for p in model.parameters()])
        model.zero_grad()
    torch.testing.assert_close(*found)


def penalty(model, x) -> torch.Tensor:
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().sum()


@pytest.mark.parametrize("middle, why", [(nn.Dropout(), "draws random numbers"),
                                         (nn.BatchNorm1d(8), "changes an input of its own")])
def test_refuses_what_eager_would_compute_differently(middle, why):
    torch._dynamo.reset()
    model = compiled(critic(middle))
    x = torch.randn(5, WIDTH, requires_grad=True)
    model(x).sum().backward()
    with pytest.raises(CaptureError, match=why):
        penalty(model, x)


def test_refuses_an_input_that_has_changed_or_is_gone():
    torch._dynamo.reset()
    model = compiled(lambda x, shift: x.square() + shift)
    x, shift = torch.randn(5, WIDTH, requires_grad=True), torch.randn(WIDTH)
    out = model(x, shift)
    shift += 1
    with pytest.raises(CaptureError, match="has changed since"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
    out = model(x, shift)
    del shift
    with pytest.raises(CaptureError, match="is gone"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_holds_no_input_for_it():
    torch._dynamo.reset()
    model = compiled(lambda x, shift: x.exp() + shift)
    x, shift = torch.randn(5, requires_grad=True), torch.randn(5)
    model(x, torch.randn(5))  # what compiles holds its example
    seen = weakref.ref(shift)
    out = model(x, shift)
    del shift
    assert seen() is None
    out.sum().backward()
    torch.testing.assert_close(x.grad, x.exp())


def test_inference_tensors():
    torch._dynamo.reset()
    model = critic()
    with torch.inference_mode():
        x = torch.randn(5, WIDTH)
        torch.testing.assert_close(compiled(model)(x), model(x))
    scaled = compiled(lambda weight, x: weight.exp() + x)
    weight = torch.randn(WIDTH, requires_grad=True)
    torch.testing.assert_close(scaled(weight, x), weight.exp() + x)


def test_autocast_around_the_model():
    torch._dynamo.reset()
    model = critic()
    x = torch.randn(5, WIDTH, requires_grad=True)
    found = []
    for each in (model, compiled(model)):
        with torch.autocast("cpu", torch.bfloat16):
            out = each(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        slope.square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    torch.testing.assert_close(*found, rtol=0, atol=0)


def hessians(model, x):
    return torch.vmap(torch.func.hessian(lambda each: model(each).sum()))(x).square().mean()


def gradients_left_behind(model, x):
    loss = model(x).square().mean()
    loss.backward(create_graph=True)
    penalty = sum(p.grad.square().sum() for p in model.parameters())
    for p in model.parameters():
        p.grad = None
    return model(x).square().mean() + penalty


@pytest.mark.parametrize("loss_of", [hessians, gradients_left_behind])
def test_what_cannot_be_differentiated_in_the_graph_is_by_the_ordinary_path(loss_of, caplog):
    """In the graph the gradients in .grad are finished: the penalty gave none. torch ends with an error of the Hessian's."""
    def trained(compile):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            loss = loss_of(model, x)
            loss.backward()
            opt.step()
            opt.zero_grad()

        step = compile(step)
        for _ in range(3):
            step(torch.ones(2, 3, dtype=torch.float64))
        return list(model.parameters())

    expected = trained(lambda step: step)
    with caplog.at_level("WARNING", logger="memopt_compile"):
        got = trained(lambda step: torch.compile(step, backend="memopt", options={"lowering": "eager"}))
    assert sum("not captured whole" in line for line in caplog.messages) == 1
    for p, q in zip(expected, got):
        torch.testing.assert_close(q, p, rtol=1e-12, atol=1e-12)
