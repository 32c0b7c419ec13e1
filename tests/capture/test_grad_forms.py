"""`torch.autograd.grad` in every form that it takes: as in eager, in one graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import compiled, largest_difference, train
from loops import Loop, mlp
from torch import nn

import memopt_compile as memopt

grad = torch.autograd.grad
FORMS = {
    "a loss": lambda o, n, ps: grad(n, ps),
    "one input": lambda o, n, ps: grad(n, ps[0]),
    "a generator of inputs": lambda o, n, ps: grad(n, (p for p in ps)),
    "by name": lambda o, n, ps: grad(outputs=[n], inputs=ps, grad_outputs=[torch.ones_like(n)], retain_graph=False,
                                     create_graph=False, allow_unused=True),
    "two losses": lambda o, n, ps: grad([n, o.mean()], ps),
    "two losses, no seeds": lambda o, n, ps: grad([n, o.mean()], ps, [None, None]),
    "two losses, seeds": lambda o, n, ps: grad((n, o.mean()), ps, (torch.ones_like(n), 2 * torch.ones_like(n))),
    "a vector": lambda o, n, ps: grad(o, ps, torch.ones_like(o)),
    "a vector in a list": lambda o, n, ps: grad([o], ps, grad_outputs=[torch.ones_like(o)]),
    "batched": lambda o, n, ps: [g.sum(0) for g in grad(
        o, ps, torch.eye(o.numel()).view(-1, *o.shape), is_grads_batched=True)],
    "of gradients": lambda o, n, ps: grad(grad(n, ps, create_graph=True), ps, [torch.ones_like(p) for p in ps]),
}


@pytest.mark.parametrize("name", FORMS)
def test_form(name):
    def build():
        model = mlp()
        parameters = list(model.parameters())

        def step(x, y):
            out = model(x)
            loss = out.square().mean()
            with torch.enable_grad():
                gradients = FORMS[name](out, loss, parameters)
            with torch.no_grad():
                for p, g in zip(parameters, gradients):
                    p.sub_(0.01 * g)
            return loss.detach()

        return Loop(step, [model], [])

    got, made = compiled(build, until=2)
    difference, where = largest_difference(train(build), got)
    assert difference <= 1e-9, f"{where}: {difference:.3e}"
    assert {record.kind for record in made} == {"step"}


def test_a_step_of_functions_returns_new_parameters():
    """As JAX has it: nothing is written in place, and nothing that comes out can be differentiated."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def step(parameters, velocity, x, y):
        def loss_of(parameters):
            return F.cross_entropy(torch.func.functional_call(model, parameters, (x,)), y)

        gradients, loss = torch.func.grad_and_value(loss_of)(parameters)
        velocity = {name: 0.9 * v + gradients[name] for name, v in velocity.items()}
        return {name: p - 0.1 * velocity[name] for name, p in parameters.items()}, velocity, loss

    def trained(step):
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        velocity, losses = {name: torch.zeros_like(p) for name, p in values.items()}, []
        for i in range(6):
            values, velocity, loss = step(values, velocity, torch.full((5, 4), 0.1 * i).double(), torch.arange(5) % 3)
            losses.append(loss)
        return values, losses

    fast = torch.compile(step, backend="memopt", options={"lowering": "eager"})
    torch.testing.assert_close(trained(fast), trained(step), rtol=1e-12, atol=0)
    assert "whole step" in str(memopt.report(fast))
