"""Ways people write a training step, each as a function that builds one.

A row is called with a seeded random state and returns a `Loop`: the step, what it trains, and
what happens around it. Eager and compiled runs each build their own from the same seed.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt_compile as memopt

WIDTH, CLASSES, BATCH = 12, 4, 6


@dataclass
class Loop:
    step: Any
    modules: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    after: Callable[[int], None] = lambda i: None
    batch: Callable[[int], int] = lambda i: BATCH
    arguments: Callable[[int], tuple] = lambda i: ()
    wrap: Callable[[Any, Callable], Any] = lambda step, compile: compile(step)


def mlp(*middle: nn.Module, width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, width), *middle, nn.GELU(), nn.Linear(width, CLASSES))


def adamw(model: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.02, **kwargs})


def loop(model: nn.Module, opt: torch.optim.Optimizer, step: Any, **kwargs: Any) -> Loop:
    return Loop(step, [model], [opt], **kwargs)


ROWS: dict[str, Callable[[], Loop]] = {}
ORDINARY: dict[str, Callable[[], Loop]] = {}


def row(function: Callable[[], Loop]) -> Callable[[], Loop]:
    ROWS[function.__name__] = function
    return function


def ordinary(function: Callable[[], Loop]) -> Callable[[], Loop]:
    """A row that runs by the ordinary path: right numbers, and one line that says so."""
    ORDINARY[function.__name__] = function
    return function


def plain(model: nn.Module | None = None, opt: Any = None, **kwargs: Any) -> Loop:
    model = model or mlp()
    opt = opt or adamw(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return loop(model, opt, step, **kwargs)


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
        return loss

    def both(x, y):
        loss = step_(x, y)
        schedule.step()
        return loss

    step_ = step
    result = loop(model, opt, step)
    result.after = lambda i: schedule.step()
    return result


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
def tensor_learning_rate() -> Loop:
    model = mlp()
    opt = adamw(model, lr=torch.tensor(0.02, dtype=torch.float64))
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
    return plain(mlp(nn.BatchNorm1d(WIDTH)))


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
    generator = torch.Generator().manual_seed(5)
    held_out = torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)

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
def grad_scaler() -> Loop:
    model = mlp()
    opt = adamw(model)
    scaler = torch.amp.GradScaler("cpu")

    def step(x, y):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        return loss.detach()

    return loop(model, opt, step)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1}, "SGD_momentum": {"lr": 0.1, "momentum": 0.9},
    "SGD_nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "SGD_dampening": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
    "SGD_maximize": {"lr": 0.1, "maximize": True, "weight_decay": 0.1},
    "Adam": {"lr": 0.02, "weight_decay": 0.1}, "AdamW": {"lr": 0.02, "amsgrad": True},
    "AdamW_foreach": {"lr": 0.02, "foreach": True}, "AdamW_fused": {"lr": 0.02, "fused": True},
    "AdamW_capturable": {"lr": 0.02},
    "Adamax": {"lr": 0.02}, "NAdam": {"lr": 0.02}, "RAdam": {"lr": 0.02},
    "Adadelta": {"lr": 0.5}, "Adagrad": {"lr": 0.05, "lr_decay": 0.1},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True}, "Rprop": {"lr": 0.01},
    "ASGD": {"lr": 0.05}, "Adafactor": {"lr": 0.02}, "Muon": {"lr": 0.02},
}


def with_optimizer(name: str) -> Loop:
    model = mlp()
    kind = getattr(torch.optim, name.split("_")[0])
    parameters = [p for p in model.parameters() if name != "Muon" or p.dim() == 2]
    return plain(model, kind(parameters, **OPTIMIZERS[name]))


def autocast(device: str = "cpu") -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return loop(model, opt, step)


def two_steps_in_one_process() -> tuple[Loop, Loop]:
    return plain(), plain()


_ = (contextlib, field)
