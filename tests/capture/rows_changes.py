"""What changes between the calls of a step, or is done beside it: numbers of the optimizer, parameters, logs."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from loops import CLASSES, WIDTH, Loop, adamw, loop, mlp, ordinary, plain, row
from torch import nn


@row
def nesterov_momentum_that_changes() -> Loop:
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.2, total_steps=20)
    return plain(model, opt, after=lambda i: schedule.step())


@row
def weight_decay_that_changes() -> Loop:
    """Added to the gradient by each in its own way."""
    models = [mlp() for _ in range(6)]
    opts = [torch.optim.SGD(models[0].parameters(), 0.1, weight_decay=0.1),
            torch.optim.Adam(models[1].parameters(), 0.02, weight_decay=0.1, maximize=True),
            torch.optim.RMSprop(models[2].parameters(), 0.01, weight_decay=0.1),
            torch.optim.Adagrad(models[3].parameters(), 0.02, weight_decay=0.1),
            torch.optim.NAdam(models[4].parameters(), 0.02, weight_decay=0.1, decoupled_weight_decay=True),
            torch.optim.Adadelta(models[5].parameters(), 0.5, weight_decay=0.1)]

    def step(x, y):
        loss = sum(F.cross_entropy(model(x), y) for model in models)
        loss.backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
        return loss

    def after(i):
        for opt in opts:
            opt.param_groups[0]["weight_decay"] *= 0.8

    return Loop(step, models, opts, after=after)


@row
def numbers_given_to_the_step() -> Loop:
    """Other ones in each call, where operators want plain numbers."""
    model = mlp()
    means = nn.ModuleList(mlp().requires_grad_(False) for _ in range(3))
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(x, y, rate, decay):
        opt.param_groups[0]["lr"] = rate
        logits = torch.clamp(model(x), -10 * decay, 10).clamp(max=5 * decay)
        loss = F.cross_entropy(logits, y)
        opt.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad.sub_(p.grad.sign(), alpha=0.1 * rate)
        opt.step()
        with torch.no_grad():
            for mean, p in zip(means[0].parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 1 - decay)
            for mean, p in zip(means[1].parameters(), model.parameters(), strict=True):
                mean.mul_(decay).add_(p, alpha=1 - decay)
            torch._foreach_lerp_(list(means[2].parameters()), list(model.parameters()), weight=1 - decay)
        return loss

    return Loop(step, [model, means], [opt], arguments=lambda i: (0.1 / (i + 1), (i + 1.5) / (i + 3)))


@row
def schedules_in_lists() -> Loop:
    """Of Python's and NumPy's kind, read at a place that the step is given or counts itself."""
    model = mlp()
    opt = adamw(model)
    rates, decays = [0.02 / (i + 1) for i in range(20)], np.linspace(0.01, 0.4, 20)
    model.calls = 0

    def step(x, y, i):
        for group in opt.param_groups:
            group["lr"], group["weight_decay"] = rates[i], decays[model.calls]
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        model.calls += 1
        return loss

    return loop(model, opt, step, arguments=lambda i: (i,))


@row
def numbers_where_operators_want_constants() -> Loop:
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), mlp())
    opt = adamw(model)

    def step(x, y, a):
        model[0].momentum = a
        z = model(x)
        one_hot, weight = F.one_hot(y, CLASSES).to(z), torch.tensor([1.0, a, 1.0, 2 * a]).to(z)
        loss = F.cross_entropy(z, y, weight=weight, label_smoothing=a, ignore_index=2) + F.relu(a - z).sum()
        loss = loss + F.huber_loss(F.leaky_relu(z, a), one_hot, delta=a) + F.smooth_l1_loss(z, one_hot, beta=a)
        loss = loss + (z.masked_fill(z > a, -a) * torch.full_like(z, a) + torch.where(z < 0, z, a)).square().mean()
        loss = loss + (z.new_full((CLASSES,), a) * (z.abs() + 1) ** a + a ** z.clamp_max(3 * a)).mean()
        mask = one_hot.clone()
        mask[:, 0] = a
        loss = loss + (mask * z * torch.full((CLASSES,), a).to(z)).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1 * a)
        opt.step()
        return loss

    return loop(model, opt, step, arguments=lambda i: (0.3 / (i + 1),))


@row
def optimizer_with_an_update_of_its_own() -> Loop:
    """It calls torch's, whose wrapper ends a graph on purpose."""
    class Halving(torch.optim.AdamW):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.requires_grad = True
                    p.grad.mul_(0.5)
            return super().step(closure)

    model = mlp()
    return plain(model, Halving(model.parameters(), 0.02))


class _Lookahead(torch.optim.Optimizer):
    """As it is found in the wild: not initialized, and with a counter that decides."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.steps = inner, inner.param_groups, 0
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def step(self):
        self.inner.step()
        self.steps += 1
        if self.steps % 3 == 0:
            for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                slow.add_(p.data - slow, alpha=0.5)
                p.data.copy_(slow)


@row
def lookahead() -> Loop:
    model = mlp()
    opt = _Lookahead(adamw(model))
    result = plain(model, opt)
    result.optimizers = [opt.inner]
    return result


@row
def groups_changed_by_the_step() -> Loop:
    """Their numbers stay numbers."""
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        for group in opt.param_groups:
            group["lr"] *= 0.9
            group["lr_next"] = max(0.5 * group["lr"], 0.01)
        return loss

    return loop(model, opt, step, wrap=lambda step, compile: _then(
        compile(step), lambda: [(type(v).__name__, v) for k, v in opt.param_groups[0].items() if "lr" in k]))


@row
def numbers_in_texts() -> Loop:
    """Of a rate that changes, and of a loss."""
    model = mlp()
    opt = adamw(model)

    def step(x, y, rate):
        opt.param_groups[0]["lr"] = rate
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        texts = "%.3f" % rate, "%d rows at %.2e" % (len(x), rate), "%(rate)5.1f%%" % {"rate": 100 * rate}  # noqa: UP031
        return loss.detach(), f"{rate:.4f}", f"{rate!r} of {len(x)}", format(rate, ".2e"), f"{loss.item():.4f}", texts

    return loop(model, opt, step, arguments=lambda i: (0.01 / (i + 1),))


@row
def optimizer_that_counts() -> Loop:
    """What it writes to itself stays, and decides in a later call."""
    class Resting(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            self.steps += 1
            if self.steps % 3:
                super().step(closure)

    model = mlp()
    opt = Resting(model.parameters(), 0.1)
    return plain(model, opt, wrap=lambda step, compile: _then(compile(step), lambda: opt.steps))


def _then(step, answer):
    def both(*args):
        return step(*args), answer()

    return both


@row
def batch_from_an_iterator() -> Loop:
    """The graph ends at `next`, before the step has begun."""
    scales = iter([torch.full((), 0.1 * i) for i in range(1, 20)])
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        loss = next(scales) * F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return loop(model, opt, step)


@row
def clamped_data() -> Loop:
    """As CLIP clamps its temperature."""
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale = mlp(), nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            return self.body(x) * self.scale.exp()

    model = Scaled()
    opt = adamw(model, lr=0.2)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        model.scale.data.clamp_(0, 1.1)
        model.body[0].bias.data.mul_(0.9)
        return loss

    return loop(model, opt, step)


@row
def updates_of_data() -> Loop:
    """Python ends ``p.data -= x`` by setting `p.data`."""
    model = mlp()

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for p in model.parameters():
            p.data -= 0.1 * p.grad
            p.grad = None
        return loss.detach()

    return Loop(step, [model], [])


def _after_two(model: nn.Module, opt: torch.optim.Optimizer, change) -> Loop:
    return plain(model, opt, after=lambda i: change() if i == 1 else None)


@row
def weights_loaded_in_place_of_the_old() -> Loop:
    """The optimizer keeps the old ones, which get no gradient any more."""
    model = mlp()
    return _after_two(model, adamw(model), lambda: model.load_state_dict(
        {k: v.clone() * 0.5 for k, v in model.state_dict().items()}, assign=True))


@row
def weight_replaced() -> Loop:
    model = mlp()
    return _after_two(model, adamw(model), lambda: setattr(
        model[0], "weight", nn.Parameter(model[0].weight.detach() * 0.5)))


@row
def weights_tied_in_the_middle() -> Loop:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))
    return _after_two(model, adamw(model), lambda: setattr(model[2], "weight", model[0].weight))


@row
def optimizer_of_other_parameters() -> Loop:
    model = mlp()
    opt = adamw(model)

    def change():
        del opt.state[model[0].weight]
        opt.param_groups[0]["params"][0] = nn.Parameter(model[0].weight.detach().clone())

    return _after_two(model, opt, change)


@ordinary
def second_half_in_pieces() -> Loop:
    """The first half is captured whole."""
    models = [mlp(), mlp()]
    opts = [adamw(model) for model in models]

    def step(x, y):
        first = F.cross_entropy(models[0](x), y)
        first.backward()
        opts[0].step()
        opts[0].zero_grad()
        value = first.item()
        second = F.cross_entropy(models[1](x), y)
        if second.item() > 1e6:
            return value
        second.backward()
        opts[1].step()
        opts[1].zero_grad()
        return value

    return Loop(step, models, opts)


@ordinary
def buffer_that_views_a_parameter() -> Loop:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(CLASSES, WIDTH))
            self.register_buffer("part", self.weight.detach()[:, :3], persistent=False)

        def forward(self, x):
            return x @ self.weight.T + x[:, :3] @ self.part.T

    return plain(Viewing())
