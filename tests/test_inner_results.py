"""Results of a compiled piece that others of its results are computed from."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from memopt_compile import CaptureError, inner_results

uncompiled = torch.compiler.disable(nn.Linear(4, 4), recursive=False)  # a function around what is none
WATCH = [lambda tensor: tensor.register_hook(lambda g: 2 * g)]  # a name finds none of it


def piece() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2)]).double(), torch.randn(3, 4, dtype=torch.float64)


def both(layers):
    def forward(x):
        hidden = layers[0](x) if x is not None else uncompiled(x)
        return hidden, hidden.detach(), layers[1](hidden.sin())

    return forward


def compiled(layers):
    torch._dynamo.reset()
    return torch.compile(both(layers), backend="memopt", options={"lowering": "eager"})


def test_positions():
    layers, x = piece()
    seen = []

    def backend(gm, inputs):
        seen.append(inner_results.positions(gm))
        return gm.forward

    for forward in (both(layers), lambda x: layers[1](layers[0](x)), lambda x: (layers[0](x), layers[1](x))):
        torch._dynamo.reset()
        torch.compile(forward, backend=backend)(x)
    assert seen == [[0], [], []]


def test_a_hook_there_is_refused():
    layers, x = piece()
    hidden, _, _ = compiled(layers)(x)
    with pytest.raises(CaptureError, match="compiled piece goes on from.*\n.*test_inner_results.py:2"):
        WATCH[0](hidden)


def test_a_hook_on_another_result_is_as_in_eager():
    layers, x = piece()
    gradients = []
    for forward in (both(layers), compiled(layers)):
        layers.zero_grad()
        hidden, _, out = forward(x)
        WATCH[0](out)
        (out.sum() + hidden.sum()).backward()
        gradients.append([p.grad.clone() for p in layers.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)


def test_results_go_when_they_are_not_needed():
    layers, x = piece()
    forward = compiled(layers)
    forward(x)
    gc.disable()
    try:
        node = weakref.ref(forward(x)[0].grad_fn)
        assert node() is None
    finally:
        gc.enable()
