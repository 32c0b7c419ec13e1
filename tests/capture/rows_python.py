"""What training programs do with Python beside the tensors: logs, counters, copies, random numbers, older forms."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import itertools
import logging
import random
import types
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from loops import BATCH, CLASSES, Loop, adamw, both_and, loop, mlp, ordinary, plain, row
from torch import nn
from torch.autograd import Variable


@row
def trainer_that_keeps_the_best() -> Loop:
    """It reads all of a list that grows, decides by a loss and copies what is the best so far."""
    class Trainer:
        def __init__(self) -> None:
            self.model, self.losses, self.window = mlp(), [], collections.deque(maxlen=5)
            self.opt, self.best, self.waited, self.kept = adamw(self.model), float("inf"), 0, None

        def step(self, x, y):
            loss = F.cross_entropy(self.model(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.losses.append(loss.item())
            self.window.append(loss.detach())
            mean = sum(self.losses[-10:]) / len(self.losses)
            if loss.item() < self.best:
                self.best, self.waited, self.kept = loss.item(), 0, copy.deepcopy(self.model.state_dict())
            else:
                self.waited += 1
            return mean, sum(self.window) / len(self.window), [float(loss) for loss in self.window]

    trainer = Trainer()
    return loop(trainer.model, trainer.opt, trainer.step, wrap=both_and(lambda: [
        trainer.losses, trainer.best, trainer.waited, dict(trainer.kept)]))


@row
def log_of_a_method() -> Loop:
    """The graph ends at the call."""
    model, history, means = mlp(), [], []
    opt = adamw(model)

    def log(loss):
        history.append(loss)
        means.append((sum(history) / len(history), max(history)))

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        log(loss.item())

    return loop(model, opt, step, wrap=both_and(lambda: [history, means]))


@row
def counters_and_rates_of_objects() -> Loop:
    """Of an `itertools.count` and a namespace. A rate that no tensor needs is a number all the same."""
    model, calls = mlp(), itertools.count(5)
    opt, state = adamw(model), types.SimpleNamespace(steps=7, rate=1.0, cold=np.float64(1.0))

    def step(x, y):
        i = next(calls)
        loss = F.cross_entropy(model(x), y) * (1 + 0.1 * i) / (state.steps if hasattr(model.forward, "__func__") else 1)
        opt.zero_grad()
        loss.backward()
        opt.step()
        state.steps += 1
        state.rate = max(0.05, state.rate * 0.9)
        state.cold = np.maximum(state.cold * np.exp(-0.1), 0.5)
        return i

    return loop(model, opt, step, wrap=both_and(lambda: [dict(vars(state)), f"{state.cold:.4f}"]))


@row
def numbers_where_losses_want_constants() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y, a):
        z = model(x)
        sign, other = (y > 1).to(z) * 2 - 1, z.flip(0)
        loss = F.softplus(z, 1 + a, 3 * a).sum() + F.elu(z, a).sum() + F.hardtanh(z, -a, a).square().sum()
        loss = loss + F.margin_ranking_loss(z[:, 0], z[:, 1], sign, margin=a) + F.hinge_embedding_loss(z[:, 0], sign, a)
        loss = loss + F.triplet_margin_loss(z, other, z.roll(1, 0), margin=a, swap=True, reduction="sum")
        loss = loss + F.cosine_embedding_loss(z, other, sign, margin=-a) + F.layer_norm(z, (CLASSES,), eps=a)[:, 0].sum()
        loss = loss + (z * torch.linspace(-a, a, CLASSES).to(z)).sum()
        if torch.__version__ >= "2.12":  # which traces it
            loss = loss + torch.quantile(z, a) + z.quantile(a, 1).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss

    return loop(model, opt, step, arguments=lambda i: (0.9 / (i + 1.3),))


@row
def reinforced() -> Loop:
    """As PyTorch's example of REINFORCE computes returns; the episode's length is drawn by Python, ahead of the step."""
    random.seed(0)
    policy = mlp(nn.Dropout(0.2))
    opt = adamw(policy)

    def step(x, y):
        scale = random.random() + 0.5
        chosen = torch.distributions.Categorical(logits=policy(Variable(x * scale)))
        returns, total = collections.deque(), 0.0
        for reward in range(BATCH):
            total = reward + 0.99 * total
            returns.appendleft(total)
        returns = torch.tensor(returns).to(x)
        loss = -(chosen.log_prob(chosen.sample()) * (returns - returns.mean()) / returns.std()).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss, scale

    return loop(policy, opt, step, wrap=both_and(lambda: list(random.getstate()[1])))


@row
def wrapped_in_the_step() -> Loop:
    """Functions wrapped as they are called, contexts that are entered one by one, and a log that nobody wants."""
    model = mlp()
    opt, log, open_now = adamw(model), logging.getLogger("memopt.tests.unheard"), []

    def if_given(function):
        @functools.wraps(function)
        def inner(x, *args):
            return None if x is None else function(x, *args)

        return inner

    class Counted:
        def __enter__(self):
            open_now.append(1)

        def __exit__(self, *exception):
            open_now.pop()

    def step(x, y):
        with contextlib.ExitStack() as stack:
            if torch.__version__ >= "2.12":  # which knows its class
                stack.enter_context(contextlib.nullcontext())
            stack.enter_context(Counted())
            loss = F.cross_entropy(if_given(model.forward)(x), y) * len(open_now) + if_given(_penalty)(model[0](x))
        log.debug(f"a loss of {loss}")
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss, len(open_now)

    return loop(model, opt, step)


def _penalty(x):
    return 0.1 * x.square().mean()


@ordinary
def log_that_is_wanted_later() -> Loop:
    log, heard = logging.getLogger("memopt.tests.heard"), []
    log.setLevel(logging.WARNING)
    log.filters[:] = [lambda record: heard.append(record.getMessage()) or False]
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        log.info("a forward of %d", len(x))
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return loop(model, opt, step, after=lambda i: log.setLevel(logging.INFO) if i == 2 else None,
                wrap=both_and(lambda: list(heard)))


@ordinary
def python_draws_in_the_middle() -> Loop:
    random.seed(0)
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        hidden = model[0](x)
        if random.uniform(0, 1) < 0.5:
            hidden = 2 * hidden
        loss = F.cross_entropy(model[2](model[1](hidden)), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return loop(model, opt, step, wrap=both_and(lambda: list(random.getstate()[1])))


class Changed(nn.Module):
    """An MLP whose hidden values are changed."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body, self.change = mlp(), change

    def forward(self, x):
        first, activation, last = self.body
        return last(activation(self.change(first(x))))


@row
def numbers_of_constants() -> Loop:
    """Shapes in a tensor, rates, and a mask that nobody has given: Python reads them, and cuts and branches by them."""
    def change(x):
        mask = torch.ones(x.shape[:1])
        mask[1:3] = 0.5
        mask.mul_(2)[mask == 1] = 1.5
        shapes = torch.tensor([[3, 4], [2, 6]])
        if (mask < 0).any() or not mask.bool().all().item():
            x = x * 2
        for rows, columns in shapes.tolist():
            x = x + x.view(-1, rows, columns).flip(1).reshape(x.shape)
        for rate in [rate.item() for rate in torch.linspace(0, 0.5, 3)]:
            x = x * (1 - rate)
        return x[:int(mask.bool().long().cumsum(0).max())] * float(mask.min()) * float(shapes.sum())

    return plain(Changed(change))


@row
def masks_of_constants() -> Loop:
    """How much they choose is known, as contrastive losses take it for; one chooses nothing."""
    def change(x):
        names = torch.arange(len(x) // 2).repeat(2)
        same, others = (names[None] == names[:, None]).float(), ~torch.eye(len(x), dtype=torch.bool)
        alike, same = (each[others].view(len(x), -1) for each in (x @ x.t(), same))
        pulled, pushed = (alike[mask].view(len(x), -1).logsumexp(1) for mask in (same.bool(), ~same.bool()))
        return x * (pushed - pulled).tanh()[:, None] + x[torch.zeros(len(x), dtype=torch.bool)].sum()

    return plain(Changed(change))


@ordinary
def constants_written_to() -> Loop:
    """What is read off a tensor that was made of constants, and holds data by then."""
    def change(x):
        lists, whole = [torch.zeros(BATCH), torch.zeros(BATCH)], torch.zeros(BATCH)
        torch._foreach_add_(lists, [x[:, 0], x[:, 1]])
        whole.detach()[1:].copy_(x[1:, 0])
        if (lists[0] > 1).any():
            x = x * 2
        return x * 3 if (whole > 1).any() else x

    return plain(Changed(change))


@ordinary
def drawn_from_constants() -> Loop:
    def change(x):
        return x * 2 if F.dropout(torch.ones(3)).sum() > 3 else x

    return plain(Changed(change))


@ordinary
def tracer_that_fails() -> Loop:
    """By an error of torch's own, where there is none in eager."""
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        scale = torch.FloatTensor(collections.deque([2.0, 3.0])).to(x)
        loss = F.cross_entropy(model(x), y) * scale.sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return loop(model, opt, step)
