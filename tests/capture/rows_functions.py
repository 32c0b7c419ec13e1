"""Functions that would end Dynamo's graph, and have their place in ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from loops import BATCH, CLASSES, WIDTH, Loop, adamw, loop, mlp, ordinary, plain, row
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Recurrent(nn.Module):
    """The batch read as sequences of a given number of steps."""

    def __init__(self, kind: type, steps: int = 3, **kwargs) -> None:
        super().__init__()
        self.steps = steps
        self.body = kind(WIDTH, WIDTH, batch_first=True, **kwargs)
        self.head = nn.Linear(WIDTH * (2 if kwargs.get("bidirectional") else 1), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.body(x.unsqueeze(1).expand(-1, self.steps, -1))
        return self.head(hidden[:, -1])


@row
def grad_scaler_that_is_not_enabled() -> Loop:
    """Training code for all types has one."""
    model = mlp()
    opt = adamw(model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        return loss

    return loop(model, opt, step)


@row
def rnn() -> Loop:
    return plain(Recurrent(nn.RNN))


@row
def gru() -> Loop:
    return plain(Recurrent(nn.GRU, bidirectional=True))


@row
def lstm() -> Loop:
    return plain(Recurrent(nn.LSTM, num_layers=2))


@row
def lstm_with_dropout() -> Loop:
    return plain(Recurrent(nn.LSTM, num_layers=3, dropout=0.3, bidirectional=True))


@row
def gru_with_dropout() -> Loop:
    return plain(Recurrent(nn.GRU, num_layers=2, dropout=0.3))


def checkpointed(body: nn.Module, run: Callable[[nn.Module, Tensor], Tensor]) -> Loop:
    model = nn.ModuleList([body, nn.Linear(WIDTH, CLASSES)])
    opt = adamw(model)

    def step(x, y):
        loss = F.cross_entropy(model[1](run(body, x)), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return loop(model, opt, step)


@row
def checkpointed_sequence() -> Loop:
    body = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(5)))
    return checkpointed(body, lambda body, x: checkpoint_sequential(body, 2, x, use_reentrant=False))


@row
def reentrant_checkpoint_of_a_batch() -> Loop:
    """Which needs no gradient, and so what is in it gets none."""
    return checkpointed(nn.Linear(WIDTH, WIDTH), lambda body, x: checkpoint(body, x, use_reentrant=True))


@ordinary
def long_lstm() -> Loop:
    return plain(Recurrent(nn.LSTM, steps=70, num_layers=2))


@ordinary
def packed_lstm() -> Loop:
    class Packed(Recurrent):
        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.arange(BATCH, 0, -1).clamp(max=self.steps)
            packed = nn.utils.rnn.pack_padded_sequence(
                x.unsqueeze(1).expand(-1, self.steps, -1), lengths, batch_first=True)
            return self.head(self.body(packed)[1][0][-1])

    return plain(Packed(nn.LSTM))


def encoder(mask: Tensor) -> Loop:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.1)
            self.body, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x.unsqueeze(1), mask=mask)[:, 0])

    return plain(Encoder())


@row
def causal_mask() -> Loop:
    return encoder(nn.Transformer.generate_square_subsequent_mask(BATCH))


@row
def other_mask() -> Loop:
    return encoder(torch.eye(BATCH))


@row
def warning_in_forward() -> Loop:
    class Warning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            warnings.warn("of this step", FutureWarning, stacklevel=2)
            return self.body(x)

    return plain(Warning())


@row
def while_loop() -> Loop:
    """A higher-order operator: Dynamo traces its body by calls of its own."""
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        with torch.no_grad():
            _, scale = torch.ops.higher_order.while_loop(
                lambda i, s: i < 3, lambda i, s: (i + 1, s * 0.5),
                (torch.zeros((), dtype=torch.int64), torch.ones((), dtype=x.dtype)), ())
        loss = F.cross_entropy(model(x) * scale, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return loop(model, opt, step)


@row
def branch() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        scaled = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos() * x, (x,))
        loss = F.cross_entropy(model(scaled), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return loop(model, opt, step)


@row
def multi_label_margin_loss() -> Loop:
    """Of labels that end by -1. What torch compiles in place of its kernel is wrong there."""
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        logits = model(x)
        rest = y.new_full((len(y), CLASSES - 2), -1)
        labels = torch.cat([y[:, None], (y[:, None] + 1) % CLASSES, rest], 1)
        of_rows = F.multilabel_margin_loss(logits, labels, reduction="none")
        loss = of_rows.square().sum() + nn.MultiLabelMarginLoss()(logits, labels)
        loss = loss + F.multilabel_margin_loss(logits[0], labels[0], size_average=False)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return loop(model, opt, step)


@row
def multi_margin_loss() -> Loop:
    """Of classes exactly at the margin at first, where the kernel and what torch compiles have other slopes."""
    model = nn.Embedding(WIDTH, CLASSES)
    with torch.no_grad():
        model.weight.copy_(torch.arange(WIDTH * CLASSES).view(WIDTH, CLASSES) % 3)
    opt = adamw(model)

    def step(x, y):
        logits = model(y)
        loss = F.multi_margin_loss(logits, y) + nn.MultiMarginLoss(p=2, margin=2, reduction="sum")(logits, y)
        loss = loss + F.multi_margin_loss(logits, y, weight=x[0, :CLASSES].abs(), reduction="none").square().sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return loop(model, opt, step)


@row
def ctc_loss() -> Loop:
    """With lengths in tensors and in lists, targets in rows and one behind the other, one sample, and a target too long."""
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        samples, length = len(x) - 1, 4
        steps = model(x).log_softmax(-1).unsqueeze(1) + torch.arange(samples).to(x)[:, None] * x[0, 0]
        targets = (y[:, None] + torch.arange(length).to(y)) % (CLASSES - 1) + 1
        lengths = torch.arange(samples) % length + 1
        inputs = torch.full((samples,), len(x), dtype=torch.long)
        loss = F.ctc_loss(steps, targets[1:], inputs, lengths)
        loss = loss + nn.CTCLoss(reduction="none", zero_infinity=True)(steps, targets[1:], inputs - len(x) + 2, lengths).sum()
        loss = loss + F.ctc_loss(steps[:, :2], targets[:2, :2].flatten(), [len(x)] * 2, (2, 2), reduction="sum")
        loss = loss + F.ctc_loss(steps[:, 0], targets[0, :3].int() - 1, inputs[0], lengths[2], blank=CLASSES - 1)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return loop(model, opt, step)


@row
def gaussian_nll_loss() -> Loop:
    """Of a variance for each number, for each row and one for all; some are below the least."""
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        found = model(x)
        mean, variance = found[:, :2], found[:, 2:3].square()
        loss = F.gaussian_nll_loss(mean, x[:, :2], variance.expand(-1, 2), full=True, eps=0.1)
        loss = loss + nn.GaussianNLLLoss(reduction="none")(mean, x[:, :2], variance + 1).square().sum()
        loss = loss + F.gaussian_nll_loss(mean, x[:, :2], variance[:, 0] + 1, reduction="sum")
        loss = loss + F.gaussian_nll_loss(mean, x[:, :2], 0.5)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return loop(model, opt, step)


@row
def func_grad_alone() -> Loop:
    model = mlp()
    parameters = dict(model.named_parameters())

    def step(x, y):
        grads = torch.func.grad(
            lambda values: F.cross_entropy(torch.func.functional_call(model, values, (x,)), y))(parameters)
        with torch.no_grad():
            for name, p in parameters.items():
                p.sub_(0.1 * grads[name])

    return Loop(step, [model], [])


@row
def two_compiled_steps() -> Loop:
    """Of two models, called in turns; both are the same function, so Dynamo keeps their graphs together."""
    first, second = plain(mlp()), plain(mlp(nn.Linear(2 * WIDTH, 2 * WIDTH), width=2 * WIDTH))

    def wrap(step, compile):
        one, other = compile(first.step), compile(second.step)
        return lambda x, y: (one(x, y), other(x, y))

    return Loop(None, [*first.modules, *second.modules], [*first.optimizers, *second.optimizers], wrap=wrap)
