"""Loops with an enabled `torch.amp.GradScaler`. In some calls a gradient overflows: there the loss is multiplied by inf.

In float64, where no scale makes one; scales are not powers of two here, so that rounding shows who multiplies by what.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from loops import ORDINARY, ROWS, Loop, adamw, both_and, mlp, ordinary, row
from torch import nn

import memopt_compile as memopt

OVERFLOWS = (1, 4)  # calls


def a_scaler(**settings) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{"init_scale": 300.0, "growth_factor": 1.7, "backoff_factor": 0.6,
                                          "growth_interval": 2, **settings})


def scaled(model, opts, step, scaler, calls=OVERFLOWS, **kwargs) -> Loop:
    """A step of (x, y, factor), what it trains, and the scaler's state, which has to be eager's too."""
    kwargs = {"wrap": both_and(lambda: scaler.state_dict()), **kwargs}
    return Loop(step, [model], opts, arguments=lambda i: (torch.tensor(torch.inf if i in calls else 1.0),), **kwargs)


def with_scaler(model=None, opt=None, before_step=lambda model, opt, scaler: None, scaler=None) -> Loop:
    model = model or mlp()
    opt, scaler = opt or adamw(model), scaler or a_scaler()

    def step(x, y, factor):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss * factor).backward()
        before_step(model, opt, scaler)
        scaler.step(opt)
        scaler.update()
        return loss.detach()

    return scaled(model, [opt], step, scaler)


@row
def grad_scaler() -> Loop:
    return with_scaler()


@row
def grad_scaler_and_clipping() -> Loop:
    def clip(model, opt, scaler):
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    return with_scaler(before_step=clip)


@row
def grad_scaler_and_a_fused_update() -> Loop:
    model = mlp()
    return with_scaler(model, adamw(model, fused=True, amsgrad=True))


@row
def grad_scaler_and_momentum() -> Loop:
    model = mlp(nn.BatchNorm1d(12))  # whose running mean is inf once, as in eager, and not put back
    return with_scaler(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1))


@row
def grad_scaler_and_a_parameter_without_gradient() -> Loop:
    model = mlp()
    model[0].bias.requires_grad_(False)
    return with_scaler(model, adamw(model))


@row
def grad_scaler_of_two_optimizers() -> Loop:
    """Of which one overflows: the other takes its step, and the scale falls."""
    model = nn.ModuleList([mlp(), mlp()])
    opts, scaler = [adamw(model[0]), torch.optim.RMSprop(model[1].parameters(), 0.01)], a_scaler()

    def step(x, y, factor):
        losses = [F.cross_entropy(model[0](x), y) * factor, F.mse_loss(model[1](x), F.one_hot(y, 4).to(x.dtype))]
        for loss in scaler.scale(losses):
            loss.backward()
        for opt in opts:
            scaler.step(opt)
            opt.zero_grad(set_to_none=False)
        scaler.update()
        return losses[1].detach()

    return scaled(model, opts, step, scaler)


@row
def grad_scaler_and_micro_batches() -> Loop:
    model = mlp()
    opt, scaler = adamw(model), a_scaler()

    def step(x, y, factor):
        for inputs, labels in memopt.micro_batches(3, x, y):
            scaler.scale(F.cross_entropy(model(inputs), labels) * factor / 3).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()

    return scaled(model, [opt], step, scaler)


@row
def grad_scaler_updated_outside() -> Loop:
    model = mlp()
    opt, scaler = adamw(model), a_scaler()

    def step(x, y, factor):
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss * factor).backward()
        scaler.step(opt)
        opt.zero_grad()
        return loss.detach()

    def wrap(step, compile):
        compiled = compile(step)
        return lambda *args: (compiled(*args), scaler.update(), scaler.state_dict())

    return scaled(model, [opt], step, scaler, wrap=wrap)


@row
def gradients_of_a_scaled_loss() -> Loop:
    """The optimizer is outside of the step."""
    model = mlp()
    opt, scaler = adamw(model), a_scaler()

    def step(x, y, factor):
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss * factor).backward()
        return loss.detach()

    def wrap(step, compile):
        compiled = compile(step)

        def both(*args):
            loss = compiled(*args)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            return loss, scaler.state_dict()

        return both

    return scaled(model, [opt], step, scaler, wrap=wrap)


@row
def grad_scaler_set_by_hand() -> Loop:
    model = mlp()
    opt, scaler = adamw(model), a_scaler()

    def step(x, y, factor):
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss * factor).backward()
        scaler.step(opt)
        scaler.update(factor.nan_to_num(posinf=10.0) * 100)
        opt.zero_grad()
        return loss.detach(), scaler.get_scale()

    return scaled(model, [opt], step, scaler)


@row
def gradient_penalty_of_a_scaled_loss() -> Loop:
    """As PyTorch's examples of mixed precision have it, with a tensor for the scale's inverse."""
    model = mlp()
    opt, scaler = adamw(model), a_scaler()

    def step(x, y, factor):
        loss = F.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        norm = sum((g / scaler._scale).square().sum() for g in gradients).sqrt()
        scaler.scale((loss + norm) * factor).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        return loss.detach()

    return scaled(model, [opt], step, scaler)


@row
def grad_scaler_and_states_of_8_bits() -> Loop:
    model = mlp(width=400)
    return with_scaler(model, memopt.optim.AdamW(model.parameters(), 0.02, state_bits=8))


@row
def grad_scaler_and_parameters_of_12_bits() -> Loop:
    """Whose draws are not counted where the update is left out."""
    model = memopt.quantize_parameters_(mlp(), bits=12)
    return with_scaler(model, memopt.optim.SGD(model.parameters(), 0.05, momentum=0.9))


@row
def grad_scaler_and_came() -> Loop:
    model = mlp()
    return with_scaler(model, memopt.optim.CAME(model.parameters(), 0.02))


class Lion(torch.optim.Optimizer):
    """As many are written: its first step makes the states."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                p.add_((0.9 * state["mean"] + 0.1 * p.grad).sign(), alpha=-group["lr"])
                state["mean"].lerp_(p.grad, 0.01)


@row
def grad_scaler_and_states_made_before() -> Loop:
    model = mlp()
    result = with_scaler(model, Lion(model.parameters()))

    def wrap(step, compile):
        compiled, calls = compile(step), []

        def call(*args):
            calls.append(1)
            return (compiled if len(calls) > 1 else step)(*args)

        return call

    result.wrap = wrap
    return result


@ordinary
def grad_scaler_and_states_made_in_its_step() -> Loop:
    model = mlp()
    return with_scaler(model, Lion(model.parameters()))


@ordinary
def grad_scaler_and_an_update_that_counts() -> Loop:
    class Counting(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            self.steps += 1
            super().step(closure)

    model = mlp()
    return with_scaler(model, Counting(model.parameters(), 0.1))


@ordinary
def grad_scaler_and_a_mean_of_weights() -> Loop:
    """Kept by a hook, which does not run where the step is left out."""
    model = mlp()
    opt, means = adamw(model), [p.detach().clone() for p in model.parameters()]

    def keep(*_):
        for mean, p in zip(means, model.parameters()):
            mean.lerp_(p.detach(), 0.1)

    opt.register_step_post_hook(keep)
    return with_scaler(model, opt)


@ordinary
def grad_scaler_and_adama() -> Loop:
    """Which frees gradients; left out, it does not."""
    model = mlp()
    return with_scaler(model, memopt.optim.AdamA(model.parameters(), 0.02))


assert len({*ROWS, *ORDINARY}) == len(ROWS) + len(ORDINARY)
