"""Steps in which the sizes of tensors depend on data: masks, positions, what is unique."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from loops import BATCH, CLASSES, WIDTH, Loop, adamw, loop, mlp, ordinary, row
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def kept(i: int) -> tuple[Tensor]:
    """Which of a batch count in step `i`: some, all, none, one."""
    places = torch.arange(BATCH)
    return ((places % 3 != 0, places >= 0, places < 0, places == 2)[i % 4],)


def masked(loss_of: Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor], model: nn.Module | None = None) -> Loop:
    model = model or mlp()
    opt = adamw(model)

    def step(x, y, keep):
        loss = loss_of(model, x, y, keep)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return loop(model, opt, step, arguments=kept)


@row
def boolean_mask() -> Loop:
    """As of tokens that are not predicted; but a sum, since the mean of none is nan."""
    return masked(lambda model, x, y, keep: F.cross_entropy(model(x)[keep], y[keep], reduction="sum"))


@row
def mask_of_two_dimensions() -> Loop:
    def loss_of(model, x, y, keep):
        wanted = keep[:, None] & (x[:, :CLASSES] > 0)
        logits = model(x)
        return (logits[wanted] - x[:, :CLASSES][wanted]).square().sum() + logits.masked_select(wanted).exp().sum()

    return masked(loss_of)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, CLASSES)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        weight, chosen = self.router(x).softmax(1).max(1)
        result = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            places = (chosen == i).nonzero().squeeze(1)
            result = result.index_add(0, places, expert(x[places]).tanh() * weight[places, None])
        return self.head(result)


@row
def mixture_of_experts() -> Loop:
    return masked(lambda model, x, y, keep: F.cross_entropy(model(x), y), Experts())


class MaskedPlaces(nn.Module):
    """A learned vector in place of what is masked, as in models that learn to fill it in."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.vector, self.head = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x, keep):
        hidden = self.body(x)
        hidden[keep] = self.vector
        return self.head(hidden.tanh())


@row
def learned_vector_at_masked_places() -> Loop:
    """The derivative of what is put there counts the places by itself."""
    return masked(lambda model, x, y, keep: F.cross_entropy(model(x, keep), y), MaskedPlaces())


@row
def contrastive() -> Loop:
    def loss_of(model, x, y, keep):
        z = F.normalize(model(x), dim=1)
        similar = z @ z.T
        others = similar[~torch.eye(BATCH, dtype=torch.bool)].view(BATCH, BATCH - 1)
        return others.logsumexp(1).mean()

    return masked(loss_of)


@row
def unique_indices() -> Loop:
    model = nn.ModuleList([nn.Embedding(CLASSES, WIDTH), mlp()])

    def loss_of(model, x, y, keep):
        found, place = torch.unique(y, return_inverse=True)
        return F.cross_entropy(model[1](x + model[0](found)[place]), y)

    return masked(loss_of, model)


@row
def checkpointed_mask() -> Loop:
    def loss_of(model, x, y, keep):
        def chosen(x):
            return model(x)[keep].tanh()

        return checkpoint(chosen, x, use_reentrant=False).square().sum()

    return masked(loss_of)


@row
def kept_rows_returned() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y, keep):
        logits = model(x)[keep]
        loss = logits.square().sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss, logits.detach(), logits.shape[0]

    return loop(model, opt, step, arguments=kept)


@row
def mask_that_changes() -> Loop:
    """One mask read twice, with a write between."""
    def loss_of(model, x, y, keep):
        logits, wanted = model(x), keep.clone()
        first = logits[wanted.nonzero().squeeze(1)].square().sum()
        wanted[0] = True
        return first + logits[wanted.nonzero().squeeze(1)].exp().sum()

    return masked(loss_of)


@row
def mask_of_a_short_batch() -> Loop:
    result = masked(lambda model, x, y, keep: F.cross_entropy(model(x)[keep], y[keep], reduction="sum"))
    result.batch = lambda i: BATCH - i % 3
    result.arguments = lambda i: (kept(i)[0][:BATCH - i % 3],)
    return result


@ordinary
def repeated_by_data() -> Loop:
    def loss_of(model, x, y, keep):
        return model(x.repeat_interleave(y + keep, dim=0)).square().sum()

    return masked(loss_of)


@ordinary
def product_of_what_is_kept() -> Loop:
    """Its derivative asks whether there is anything."""
    return masked(lambda model, x, y, keep: model(x)[keep].prod(1).sum())


@ordinary
def branch_on_any() -> Loop:
    def loss_of(model, x, y, keep):
        logits = model(x)
        if keep.any():
            return F.cross_entropy(logits[keep], y[keep])
        return logits.sum() * 0

    return masked(loss_of)


@ordinary
def branch_on_a_size() -> Loop:
    def loss_of(model, x, y, keep):
        logits = model(x)
        places = keep.nonzero()
        if len(places) == 0:
            return logits.sum() * 0
        return logits[places[:, 0]].square().mean()

    return masked(loss_of)
