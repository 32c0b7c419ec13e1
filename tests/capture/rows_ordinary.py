"""Steps that cannot be one graph: right numbers by the ordinary path."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from loops import CLASSES, WIDTH, Loop, adamw, loop, mlp, ordinary, plain
from torch import nn
from torch.utils.checkpoint import checkpoint


@ordinary
def print_in_forward() -> Loop:
    class Printing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            torch._dynamo.graph_break()
            return self.body(x)

    return plain(Printing())


@ordinary
def gradient_hook() -> Loop:
    result = plain()
    result.modules[0][0].weight.register_hook(lambda g: g * 0.5)
    return result


@ordinary
def post_accumulate_hook() -> Loop:
    result = plain()

    def halve(p):
        p.grad.mul_(0.5)

    result.modules[0][0].weight.register_post_accumulate_grad_hook(halve)
    return result


@ordinary
def loss_from_outside() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(loss):
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    def wrap(step, compile):
        compiled = compile(step)
        return lambda x, y: compiled(F.cross_entropy(model(x), y))

    return loop(model, opt, step, wrap=wrap)


@ordinary
def loss_item_before_backward() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        if loss.item() > 1e6:
            return loss.detach()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return loop(model, opt, step)


@ordinary
def lbfgs() -> Loop:
    model = mlp()
    opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def step(x, y):
        def closure():
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return opt.step(closure)

    return loop(model, opt, step)


@ordinary
def hook_registered_later() -> Loop:
    result = plain()

    def after(i):
        if i == 2:
            result.modules[0][0].weight.register_hook(lambda g: g * 0.5)

    result.after = after
    return result


@ordinary
def break_below_a_generator() -> Loop:
    """torch cannot compile what is left of the step then: it runs its parts, each on its own."""
    models = nn.ModuleList([mlp(), mlp()])
    opt = adamw(models)

    def loss_of(model, x, y):
        loss = F.cross_entropy(model(x), y)
        return loss if loss.item() < 1e6 else loss * 0

    def step(x, y):
        loss = sum(loss_of(model, x, y) for model in models)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return loop(models, opt, step)


@ordinary
def checkpointed_dropout() -> Loop:
    """In the graph a checkpoint is a mark only: run as it is, that draws other numbers again."""
    class Renormed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(WIDTH, WIDTH, max_norm=0.5)  # changed while autograd follows it
            self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            x = x + self.table(x.argmax(-1))
            x = checkpoint(lambda x: F.dropout(self.body(x).tanh(), 0.5), x, use_reentrant=False)
            return self.head(x)

    return plain(Renormed())


class _Scaled(torch.autograd.Function):
    """A function that gives its scale no gradient."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


@ordinary
def function_without_a_gradient() -> Loop:
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale = mlp(), nn.Parameter(torch.full((CLASSES,), 0.5))

        def forward(self, x):
            return _Scaled.apply(self.body(x), self.scale)

    return plain(Scaling())
