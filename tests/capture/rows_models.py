"""What the model holds, how the step is wrapped, and how gradients add up."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from loops import BATCH, CLASSES, WIDTH, Loop, adamw, loop, mlp, plain, row
from torch import Tensor, nn

import memopt_compile as memopt


@row
def frozen_parameters() -> Loop:
    model = mlp()
    model[0].weight.requires_grad_(False)
    return plain(model, adamw(model))


@row
def tied_weights() -> Loop:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Linear(WIDTH, WIDTH)
            self.decode = nn.Linear(WIDTH, WIDTH)
            self.decode.weight = self.encode.weight
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            return self.head(self.decode(torch.tanh(self.encode(x))))

    return plain(Tied())


@row
def batch_norm() -> Loop:
    return plain(nn.Sequential(nn.BatchNorm1d(WIDTH), mlp()))


@row
def dropout() -> Loop:
    return plain(mlp(nn.Dropout(0.3)))


@row
def checkpointed() -> Loop:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = mlp(), nn.Linear(CLASSES, CLASSES)

        def forward(self, x):
            return self.head(torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False))

    return plain(Checkpointed())


@row
def method() -> Loop:
    class Trainer:
        def __init__(self) -> None:
            self.model = mlp()
            self.opt = adamw(self.model)

        def step(self, x, y):
            self.opt.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.opt.step()
            return loss

    trainer = Trainer()
    return loop(trainer.model, trainer.opt, trainer.step)


@row
def module() -> Loop:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = mlp()
            self.opt = adamw(self.model)

        def forward(self, x, y):
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            return loss

    trainer = Step()
    return loop(trainer.model, trainer.opt, trainer)


@row
def arguments() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y, model, opt):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return loop(model, opt, step, arguments=lambda i: (model, opt))


@row
def micro_batches() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        total = 0.0
        for mx, my in memopt.micro_batches(3, x, y):
            loss = F.cross_entropy(model(mx), my) / 3
            loss.backward()
            total = total + loss.detach()
        opt.step()
        opt.zero_grad()
        return total

    return loop(model, opt, step)


@row
def micro_batches_then_clip() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        opt.zero_grad()
        for mx, my in zip(x.chunk(2), y.chunk(2)):
            (F.cross_entropy(model(mx), my) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()

    return loop(model, opt, step)


@row
def accumulated_across_calls() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y, last):
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        if last:
            opt.step()
            opt.zero_grad()
        return loss

    return loop(model, opt, step, arguments=lambda i: (i % 2 == 1,))


@row
def autograd_grad() -> Loop:
    model = mlp()
    parameters = list(model.parameters())

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        grads = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for p, g in zip(parameters, grads):
                p.sub_(0.1 * g)
        return loss

    return Loop(step, [model], [])


@row
def autograd_grad_with_optimizer() -> Loop:
    model = mlp()
    opt = adamw(model)
    parameters = list(model.parameters())

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters)):
            p.grad = g
        opt.step()
        opt.zero_grad()
        return loss

    return loop(model, opt, step)


@row
def func_grad() -> Loop:
    model = mlp()
    parameters = dict(model.named_parameters())

    def loss_of(values, x, y):
        return F.cross_entropy(torch.func.functional_call(model, values, (x,)), y)

    def step(x, y):
        grads, loss = torch.func.grad_and_value(loss_of)(parameters, x, y)
        with torch.no_grad():
            for name, p in parameters.items():
                p.sub_(0.1 * grads[name])
        return loss

    return Loop(step, [model], [])


@row
def retained_graph() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        logits = model(x)
        F.cross_entropy(logits, y).backward(retain_graph=True)
        (logits.square().mean() * 0.1).backward()
        opt.step()
        opt.zero_grad()
        return logits

    return loop(model, opt, step)


@row
def two_losses_one_backward() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        logits = model(x)
        loss = F.cross_entropy(logits, y) + 0.01 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return loop(model, opt, step)


@row
def short_last_batch() -> Loop:
    return plain(batch=lambda i: 3 if i % 4 == 3 else BATCH)


@row
def evaluation_between_steps() -> Loop:
    model = mlp(nn.Dropout(0.2))
    opt = adamw(model)
    result = plain(model, opt)
    generator = torch.Generator(model[0].weight.device).manual_seed(5)
    held_out = torch.randn(5, WIDTH, generator=generator)

    def evaluate(i):
        model.eval()
        with torch.no_grad():
            model(held_out)
        model.train()

    result.after = evaluate
    return result


@row
def state_loaded_in_the_middle() -> Loop:
    result = plain()
    (model,), (opt,) = result.modules, result.optimizers
    saved = {}

    def after(i):
        if i == 2:
            saved.update(opt=_copy(opt.state_dict()), model=_copy(model.state_dict()))
        if i == 4:
            opt.load_state_dict(saved["opt"])
            model.load_state_dict(saved["model"])

    result.after = after
    return result


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_copy(v) for v in value]
    return value


@row
def unused_in_some_steps() -> Loop:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = mlp(), mlp()

        def forward(self, x, left):
            return self.left(x) if left else self.right(x)

    model = Branches()
    opt = adamw(model)

    def step(x, y, left):
        loss = F.cross_entropy(model(x, left), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return loop(model, opt, step, arguments=lambda i: (i % 2 == 0,))


@row
def optimizer_step_hooks() -> Loop:
    result = plain()
    seen = []
    result.optimizers[0].register_step_post_hook(lambda opt, args, kwargs: None)
    del seen
    return result


@row
def nan_guard_in_tensor_code() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss = torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss))
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return loop(model, opt, step)


@row
def weighted_backward() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        losses = F.cross_entropy(model(x), y, reduction="none")
        losses.backward(torch.linspace(0, 1, len(x)).to(losses))
        opt.step()
        opt.zero_grad()
        return losses

    return loop(model, opt, step)


@row
def unfrozen_in_the_middle() -> Loop:
    result = plain()
    first = result.modules[0][0]
    first.weight.requires_grad_(False)

    def after(i):
        first.weight.requires_grad_(i >= 2)

    result.after = after
    return result


@row
def group_added_in_the_middle() -> Loop:
    model = mlp()
    opt = torch.optim.AdamW(model[0].parameters(), lr=0.02)
    result = plain(model, opt)

    def after(i):
        if i == 2:
            opt.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})

    result.after = after
    return result


@row
def gradients_kept_for_the_user() -> Loop:
    model = mlp()
    opt = adamw(model)
    norms = []

    def step(x, y):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    result = loop(model, opt, step)
    result.after = lambda i: norms.append(sum(p.grad.norm() for p in model.parameters()))
    return result
