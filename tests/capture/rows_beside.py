"""What acts on a step from beside it, or stays behind: hooks that come later, random numbers, statistics."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from loops import WIDTH, Loop, adamw, loop, mlp, ordinary, plain, row
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop


def hooked(register: Callable[[nn.Module], torch.utils.hooks.RemovableHandle]) -> Loop:
    """A hook is there in the fourth and fifth of seven steps."""
    model = mlp()
    handles = []

    def after(i):
        if i == 2:
            handles.append(register(model))
        if i == 4:
            handles.pop().remove()

    return plain(model, after=after)


@row
def module_hook_in_some_steps() -> Loop:
    return hooked(lambda model: model[0].register_forward_hook(lambda module, given, result: 0.5 * result))


@row
def hook_of_all_modules_in_some_steps() -> Loop:
    return hooked(lambda model: register_module_forward_hook(
        lambda module, given, result: 0.5 * result if isinstance(module, nn.GELU) else None))


@ordinary
def module_backward_hook_in_some_steps() -> Loop:
    return hooked(lambda model: model[2].register_full_backward_pre_hook(lambda module, grads: (0.5 * grads[0],)))


@row
def step_of_the_class_replaced_in_the_middle() -> Loop:
    class Own(torch.optim.AdamW):
        pass

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(0.5)
        return torch.optim.AdamW.step(self, closure)

    model = mlp()
    opt = Own(model.parameters(), 0.02)

    def after(i):
        if i == 2:
            Own.step = step
        if i == 4:
            opt.zero_grad = lambda: None

    return plain(model, opt, after=after)


@row
def methods_of_classes_replaced_in_the_middle() -> Loop:
    class Base(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            return self.body(x)

    class Model(Base):
        def forward(self, x):
            return super().forward(x)

    class Criterion:
        @classmethod
        def of(cls, logits, y):
            return F.cross_entropy(logits, y)

    model, criterion = Model(), Criterion()
    opt = adamw(model)

    def step(x, y):
        loss = criterion.of(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    def after(i):
        if i == 1:
            Base.forward = lambda self, x: 0.5 * self.body(x)
        if i == 3:
            Criterion.of = classmethod(lambda cls, logits, y: 0.5 * F.cross_entropy(logits, y))

    return loop(model, opt, step, after=after)


@row
def things_that_are_not_there_at_first() -> Loop:
    """A key and attributes, asked for by an error or with a default."""
    model, settings = mlp(), {}
    opt = adamw(model)

    def scale() -> float:
        return getattr(scale, "value", 1.0)

    def step(x, y):
        loss = scale() * F.cross_entropy(model(x), y)
        try:
            loss = loss * settings["scale"]
        except KeyError:
            pass
        try:
            loss = loss + model.shift * loss.square()
        except AttributeError:
            pass
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    def after(i):
        if i == 1:
            settings["scale"] = 0.5
        if i == 2:
            model.shift = 0.3
        if i == 3:
            scale.value = 0.5

    return loop(model, opt, step, after=after)


@row
def scheduler_attached_in_the_middle() -> Loop:
    model = mlp()
    opt = adamw(model)
    schedulers = []

    def after(i):
        if i == 2:
            schedulers.append(torch.optim.lr_scheduler.ExponentialLR(opt, 0.8))
        for scheduler in schedulers:
            scheduler.step()

    return plain(model, opt, after=after)


@ordinary
def step_put_on_the_optimizer() -> Loop:
    model = mlp()
    opt = adamw(model)
    update = opt.step

    def step():
        for p in model.parameters():
            p.grad.mul_(0.5)
        return update()

    opt.step = step
    return plain(model, opt)


@ordinary
def hooks_on_saved_tensors() -> Loop:
    """Of the caller: what they change, the gradient shows."""
    def wrap(step, compile):
        inner = compile(step)

        def hooked(*args):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 0.5 if t.is_floating_point() else t, lambda t: t):
                return inner(*args)

        return hooked

    return plain(wrap=wrap)


@row
def random_numbers_of_numpy() -> Loop:
    """What is drawn comes from the generator that `np.random.seed` sets. The graph ends there, before the step has begun."""
    np.random.seed(0)
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        x = x + torch.from_numpy(0.1 * np.random.randn(*x.shape)).to(x)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return loop(model, opt, step, wrap=lambda step, compile: _then(compile(step), lambda: np.random.rand()))


def _then(step: Callable, answer: Callable) -> Callable:
    def both(*args):
        return step(*args), answer()

    return both


@row
def random_numbers_that_nobody_reads() -> Loop:
    """As in the last turn of a loop: the next ones are others for it."""
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        loss = 0
        for _ in range(2):
            loss = loss + F.cross_entropy(model(x), y)
            x = torch.where(torch.rand_like(x) < 0.5, x, F.dropout(x, 0.5))
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return loop(model, opt, step)


@ordinary
def nested_tensor() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        sequences = torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged)
        loss = F.cross_entropy(model(sequences).values(), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return loop(model, opt, step)


@ordinary
def context_that_cannot_be_traced() -> Loop:
    """Dynamo leaves the function to Python as a whole, without having seen a forward."""
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        with set_checkpoint_early_stop(False):
            loss = F.cross_entropy(checkpoint(model, x, use_reentrant=False), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return loop(model, opt, step)


@row
def batch_norm_of_all_batches() -> Loop:
    """With ``momentum=None`` the share of a batch in the means is one by their number."""
    model = nn.Sequential(nn.BatchNorm1d(WIDTH, momentum=None), mlp())

    def after(i):
        model.train(i != 3)
        if i == 4:
            model[0].reset_running_stats()

    return plain(model, after=after)
