"""A compiled model with an output that the loss does not use gives the gradients that eager gives, and no others."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

import memopt_compile as memopt

WIDTH = 4


class Heads(nn.Module):
    """Outputs that share the trunk: alone, as views of one value, and by way of a change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.pooler, self.written, self.added = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        hidden = self.trunk(x)
        pooled = self.pooler(hidden.sin())
        kept = torch.zeros_like(x)
        kept.add_(self.written(hidden)).mul_(2)
        return hidden, pooled.t(), pooled[0], kept, kept + self.added(x)


@pytest.mark.parametrize("before", [False, True], ids=["batch", "activation"])
def test_gradients_are_of_what_is_used(before):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, first, x = Heads().double(), nn.Linear(WIDTH, WIDTH).double(), torch.randn(3, WIDTH, dtype=torch.float64)
    parameters = [*model.parameters(), *first.parameters()]

    def gradients(run, used):
        for p in parameters:
            p.grad = None
        outputs = run(first(x) if before else x)
        sum(outputs[k].square().sum() for k in used).backward()
        return [p.grad for p in parameters]

    compiled = torch.compile(model, backend="memopt", options={"lowering": "eager"})
    for used in itertools.chain.from_iterable(itertools.combinations(range(5), n) for n in (1, 2, 5)):
        expected, got = gradients(model, used), gradients(compiled, used)
        assert [g is None for g in got] == [g is None for g in expected], used
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.skipif(not hasattr(BackwardCFunction, "apply_boxed"), reason="torch itself keeps it, before 2.13")
def test_a_piece_lets_go_of_the_gradient_that_it_is_given():
    """As each of eager's operators does: the first result is used alone, and its gradient may be gone before the weight's is made."""
    def backward_bytes(compiled):
        torch._dynamo.reset()
        model = nn.Linear(64, 64)
        x, used = torch.randn(8, 64), torch.randn(8, 64)

        def piece(x):
            return model(x.tanh()).tanh()

        run = torch.compile(piece, backend="memopt", options={"lowering": "eager"}) if compiled else piece
        for _ in range(2):
            loss = (run(x) * used).sum()
            memory = memopt.measure(loss.backward, resident=(model, x, used))
        return memory.transient_peak_bytes

    assert backward_bytes(True) == backward_bytes(False)


def test_weight_decay_leaves_an_unused_pooler_alone():
    """Behind a cut in the model: parts of a step that is not one graph."""
    def trained(way):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Heads().double()
        opt = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
        uncompiled = torch.compiler.disable(model, recursive=False)

        def step(x):
            loss = uncompiled(x)[0].square().sum()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        step = way(step)
        losses = [step(torch.randn(3, WIDTH, dtype=torch.float64)).detach() for _ in range(3)]
        return [*losses, *(p.detach() for p in model.parameters())], len(opt.state)

    expected, got = trained(lambda step: step), trained(
        lambda step: torch.compile(step, backend="memopt", options={"lowering": "eager"}))
    torch.testing.assert_close(got[0], expected[0], rtol=1e-12, atol=1e-14)
    assert got[1] == expected[1] == 2
