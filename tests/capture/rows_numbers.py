"""Numbers that a step reads off its tensors, and what it keeps of them."""

from __future__ import annotations

import collections
import math

import torch
import torch.nn.functional as F
from loops import Loop, adamw, both_and, loop, mlp, ordinary, row
from torch import nn


@row
def metrics_before_the_update() -> Loop:
    """Added up over the calls, as floats and as counts."""
    model = mlp(nn.Dropout(0.2))
    opt = adamw(model)
    seen = {"loss": 0.0, "right": 0, "rows": 0}

    def step(x, y):
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        seen["loss"] += loss.item() * len(x)
        seen["right"] += (logits.argmax(1) == y).sum().item()
        seen["rows"] += len(y)
        opt.zero_grad()
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        opt.step()
        return {**seen, "share": 100.0 * seen["right"] / seen["rows"], "norm": norm}

    return loop(model, opt, step)


@row
def number_of_what_changes_later() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        label = torch.full((len(x), 4), 1.0, dtype=x.dtype)
        before = label.sum().item(), label[0, 0].item(), model[0].bias[0].item()
        label.fill_(0.0)
        loss = F.mse_loss(model(x), label)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return *before, max(0.5, *before), loss

    return loop(model, opt, step)


@row
def adversaries() -> Loop:
    """As PyTorch's tutorial of DCGAN writes them."""
    maker, judge = nn.Sequential(nn.Linear(3, 12), nn.Tanh()), nn.Sequential(nn.Linear(12, 1), nn.Sigmoid())
    for_maker, for_judge = adamw(maker), adamw(judge)
    criterion = nn.BCELoss()

    def step(x, y):
        judge.zero_grad()
        label = torch.full((len(x),), 1.0, dtype=x.dtype)
        of_real = criterion(judge(x).view(-1), label)
        of_real.backward()
        real = judge(x).mean().item()
        made = maker(torch.randn(len(x), 3, dtype=x.dtype, device=x.device))
        label.fill_(0.0)
        of_made = criterion(judge(made.detach()).view(-1), label)
        of_made.backward()
        for_judge.step()
        maker.zero_grad()
        label.fill_(1.0)
        loss = criterion(judge(made).view(-1), label)
        loss.backward()
        for_maker.step()
        return real, of_real + of_made, loss

    return Loop(step, [maker, judge], [for_maker, for_judge])


@row
def lists_that_grow() -> Loop:
    """Only appended to, before and behind the update: how long they are is no part of the step."""
    model = mlp()
    opt = adamw(model)
    losses, history, last = [], {"norm": [], "loss": []}, collections.deque([0.0], maxlen=2)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        last.append(loss.item())
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.detach())
        for p in model.parameters():
            history["norm"].append(p.grad.norm().item())
        history["loss"] += [len(x), loss.item()]

    return loop(model, opt, step, wrap=lambda step, compile: _then(compile(step), lambda: [
        list(losses), dict(history), list(last), last.maxlen]))


def _then(step, answer):
    def both(*args):
        step(*args)
        return answer()

    return both


@row
def means_of_losses() -> Loop:
    """Attributes that are floats, written behind the update."""
    model = mlp()
    opt = adamw(model)
    model.mean, model.steps = 0.0, 0

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        model.mean = 0.9 * model.mean + 0.1 * loss.item()
        model.steps += 1
        return model.mean / (1 - 0.9 ** model.steps)

    return loop(model, opt, step)


@row
def number_that_chooses_a_name() -> Loop:
    """Behind the update: the graph ends there, but is whole."""
    model = mlp()
    opt = adamw(model)
    names = ["first", "second", "third", "fourth"]

    def step(x, y):
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return names[logits[0].argmax().item()]

    return loop(model, opt, step)


@row
def window_of_losses() -> Loop:
    """Read as a whole, and longer at each call until it is full."""
    model = mlp()
    opt = adamw(model)
    window = collections.deque(maxlen=2)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        window.append(loss.detach())
        return sum(window) / len(window)

    return loop(model, opt, step)


@row
def metrics_in_a_loop() -> Loop:
    seen = {}
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        for name, value in {"loss": loss, "root": loss.sqrt()}.items():
            seen[name] = value.item()
        return dict(seen)

    return loop(model, opt, step)


@row
def random_shares_that_change() -> Loop:
    """Down to none, where eager draws nothing."""
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.rate = mlp(nn.Dropout(0.5)), 0.4

        def forward(self, x):
            x = F.dropout(x, p=self.rate, training=self.training)
            keep = x.new_empty(len(x), 1).bernoulli_(1 - self.rate)
            return self.body(x * keep)

    model = Dropping()
    opt = adamw(model)

    def step(x, y, width):
        x = x + torch.empty_like(x).uniform_(-width, width)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad += torch.normal(0.0, width, size=p.shape, device=p.device) + torch.empty_like(p).normal_(std=width)
        opt.step()
        return loss

    def after(i):
        model.rate, model.body[1].p = max(0.3 - 0.1 * i, 0.0), 0.5 / (i + 2)

    return loop(model, opt, step, after=after, arguments=lambda i: (0.1 / (i + 1),))


@row
def scale_of_the_loss() -> Loop:
    """Written by the step, and made of itself alone."""
    model = mlp()
    opt = adamw(model)
    scaler = {"scale": 1024.0}

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        (loss * scaler["scale"]).backward()
        for p in model.parameters():
            p.grad.mul_(1 / scaler["scale"])
        opt.step()
        scaler["scale"] *= 2
        return loss

    return loop(model, opt, step, wrap=lambda step, compile: _then(compile(step), lambda: dict(scaler)))


@row
def numbers_that_grow() -> Loop:
    """A dict with a key for each call, and what has come to a list last."""
    model = mlp()
    opt = adamw(model)
    losses, by_number, by_text = [], {}, {}

    def step(x, y, i):
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        by_number[i] = by_text[f"step {i}"] = loss.item()
        losses.append(loss.item())
        return losses[-1] - losses[-2] if len(losses) > 1 else 0.0

    return loop(model, opt, step, arguments=lambda i: (i,), wrap=both_and(lambda: [by_number, by_text, losses]))


@row
def texts_as_keys() -> Loop:
    """Of a number that changes: what they find is another thing then."""
    model = mlp()
    opt = adamw(model)
    weights, kinds, seen, last = {"e2": 3.0, "e4": 5.0}, {"k1", "k5"}, {}, {}

    def step(x, y, i):
        weight = weights.get("e{}".format(i), 1.0) + (2.0 if f"k{i}" in kinds else 0.0)  # noqa: UP032
        loss = weight * F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        seen.setdefault("part %d" % (i // 3), []).append(i)  # noqa: UP031
        if i // 3 not in last:
            last[i // 3] = 0
        last[i // 3] += len(f"{10 ** i}")
        return weight

    return loop(model, opt, step, arguments=lambda i: (i,), wrap=both_and(lambda: [seen, last]))


@ordinary
def loss_divided_by_its_number() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        value = loss.item()
        (loss / value).backward()
        opt.step()
        opt.zero_grad()
        return value

    return loop(model, opt, step)


class Reversed(torch.autograd.Function):
    """Ganin and Lempitsky (2015): the gradient turned around, and scaled."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad * ctx.scale, None


@row
def functions_of_a_count() -> Loop:
    """Weights that grow with the count of calls, as of VAEs and adversarial domains; one is kept as a number."""
    model, other = mlp(), nn.Linear(12, 2)
    opt = adamw(nn.ModuleList([model, other]))
    seen = {"calls": 0}

    def step(x, y):
        scale = 2.0 / (1.0 + math.exp(-10 * (seen["calls"] / 100))) - 1.0
        annealed = 1 / (1 + math.exp(3.0 - seen["calls"]))
        seen["calls"] += 1
        seen["log"] = math.log(seen["calls"] + 1)
        loss = F.cross_entropy(model(x), y) + annealed * model[0].weight.square().mean() * seen["log"]
        loss = loss + F.cross_entropy(other(Reversed.apply(model[0](x), scale)), y % 2)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.detach(), seen["log"], isinstance(scale, float)

    return loop(nn.ModuleList([model, other]), opt, step)
