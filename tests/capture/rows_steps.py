"""Losses, optimizers and schedulers in every order and number."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from loops import Loop, adamw, loop, mlp, plain, row
from torch import nn


@row
def zero_grad_last() -> Loop:
    return plain()


@row
def zero_grad_first() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    return loop(model, opt, step)


@row
def zero_grad_not_to_none() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        opt.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    return loop(model, opt, step)


@row
def module_zero_grad() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    return loop(model, opt, step)


@row
def gradients_zeroed_by_hand() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.detach_()
                p.grad.zero_()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    return loop(model, opt, step)


@row
def loss_item() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.item()

    return loop(model, opt, step)


@row
def function_backward() -> Loop:
    """torch.autograd's own, of one loss or several, and with gradients given."""
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        torch.autograd.backward([loss, logits], [None, 0.1 * torch.ones_like(logits)], retain_graph=True)
        torch.autograd.backward(loss)
        opt.step()
        opt.zero_grad()
        return loss

    return loop(model, opt, step)


@row
def two_backwards_that_share_a_sum() -> Loop:
    """The sum keeps nothing for its backward, so eager may go through it twice."""
    model = mlp()
    shift = nn.Parameter(torch.ones(1))
    model.register_parameter("shift", shift)
    opt = adamw(model)

    def step(x, y):
        moved = x + shift
        moved.square().mean().backward()
        moved.exp().mean().backward()
        opt.step()
        opt.zero_grad()
        return moved.detach()

    return loop(model, opt, step)


@row
def logits_and_metrics() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        right = (logits.argmax(-1) == y).double().mean()
        return {"loss": loss, "logits": logits, "accuracy": right}

    return loop(model, opt, step)


def _clipped(clip: Callable) -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        clip(model.parameters(), 0.05)
        opt.step()
        opt.zero_grad()
        return loss

    return loop(model, opt, step)


@row
def clip_grad_norm() -> Loop:
    return _clipped(nn.utils.clip_grad_norm_)


@row
def clip_grad_value() -> Loop:
    return _clipped(nn.utils.clip_grad_value_)


@row
def clip_grad_norm_returned() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        opt.step()
        return loss.detach(), norm

    return loop(model, opt, step)


@row
def scheduler_every_step() -> Loop:
    model = mlp()
    opt = adamw(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
    return plain(model, opt, after=lambda i: schedule.step())


@row
def scheduler_of_sgd() -> Loop:
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    return plain(model, opt, after=lambda i: schedule.step())


@row
def scheduler_inside_the_step() -> Loop:
    model = mlp()
    opt = adamw(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: 1 / (1 + i))

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        schedule.step()
        return loss

    return loop(model, opt, step)


@row
def one_cycle_changes_betas() -> Loop:
    model = mlp()
    opt = adamw(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.05, total_steps=20)
    return plain(model, opt, after=lambda i: schedule.step())


@row
def one_cycle_changes_momentum() -> Loop:
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.2, total_steps=20)
    return plain(model, opt, after=lambda i: schedule.step())


@row
def default_device() -> Loop:
    """As `torch.set_default_device` has it: a mode in which Dynamo would call Python's `backward`."""
    def wrap(step, compile):
        inner = compile(step)

        def under_a_device(*args):
            with torch.get_default_device():
                return inner(*args)

        return under_a_device

    return plain(wrap=wrap)


@row
def tensor_learning_rate() -> Loop:
    model = mlp()
    opt = adamw(model, lr=torch.tensor(0.02))
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    return plain(model, opt, after=lambda i: schedule.step())


@row
def parameter_groups() -> Loop:
    model = mlp()
    opt = torch.optim.AdamW([
        {"params": model[0].parameters(), "lr": 0.05, "weight_decay": 0.1},
        {"params": model[2].parameters(), "betas": (0.8, 0.9), "amsgrad": True},
    ], lr=0.01)
    return plain(model, opt)


@row
def two_optimizers() -> Loop:
    model = mlp()
    first = torch.optim.AdamW(model[0].parameters(), lr=0.02)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)

    def step(x, y):
        first.zero_grad()
        second.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        first.step()
        second.step()
        return loss

    return Loop(step, [model], [first, second])


@row
def tensor_check() -> Loop:
    """As Hugging Face models check their inputs while they are traced."""
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        torch._check_tensor_all(y >= 0, lambda: "labels are counted from 0")
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return loop(model, opt, step)


@row
def scalar_parameters() -> Loop:
    model = mlp()
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
    model.register_parameter("shift", nn.Parameter(torch.tensor(0.1)))
    opt = adamw(model)

    def step(x, y):
        loss = F.cross_entropy(model(x) * model.scale.exp(), y) + model.shift.square()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return loop(model, opt, step)


@row
def updates_by_operators() -> Loop:
    """``p -= x`` binds `p` anew, to the same parameter; so does what returns it, and ``del p.grad``."""
    model = mlp()

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            first, second, *others = model.parameters()
            torch.sub(first, first.grad, alpha=0.1, out=first).grad = None
            second = torch.clamp_(second.sub_(0.1 * second.grad), -1, 1)
            del second.grad
            for p in others:
                p *= 0.99
                p -= 0.1 * p.grad
                p.grad = None
        return loss

    return Loop(step, [model], [])


@row
def momentum_encoder() -> Loop:
    """A mean of the parameters that takes part in the loss (MoCo, BYOL)."""
    model, mean = mlp(), mlp().requires_grad_(False)
    opt = adamw(model)

    def step(x, y):
        with torch.no_grad():
            for p, q in zip(model.parameters(), mean.parameters(), strict=True):
                q.mul_(0.9).add_(p, alpha=0.1)
            targets = mean(x)
        loss = F.mse_loss(model(x), targets) + F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return Loop(step, [model, mean], [opt])
