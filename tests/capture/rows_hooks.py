"""Hooks on tensors that the step computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from loops import Loop, adamw, loop, mlp, ordinary, row
from rows_names import Settings
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def hooked(put: Callable[[Tensor, Tensor], None], behind: Callable = lambda: None, first: Callable | None = None) -> Loop:
    """`put` is given what the first layer makes, and what the model makes of it."""
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        hidden = first(model[0], x) if first else model[0](x)
        out = model[1:](hidden)
        put(hidden, out)
        (F.cross_entropy(out, y) + hidden.square().mean()).backward()
        behind()
        opt.step()
        opt.zero_grad()

    return loop(model, opt, step)


@row
def hook_that_reads_what_came_before_and_behind() -> Loop:
    def put(hidden, out):
        size, sign = out.detach().abs().mean(), hidden.detach().sign()
        hidden.register_hook(lambda g: g * size + sign)
        hidden.register_hook(lambda g: None)
        hidden.register_hook(lambda g: g.clamp(-0.01, 0.01) * hidden.detach())

    return hooked(put)


@row
def hook_that_reads_what_an_update_changes_in_place() -> Loop:
    size = torch.ones(())

    def first(layer, x):
        twice = size * 2
        size.add_(1)
        hidden = layer(x)
        hidden.register_hook(lambda g: g * twice)
        return hidden

    return hooked(lambda hidden, out: None, first=first)


@row
def hook_in_a_checkpoint() -> Loop:
    def first(layer, x):
        def apart(x):
            hidden, size = layer(x), x.abs().mean()
            hidden.register_hook(lambda g: g * size)
            return hidden.sin()

        return checkpoint(apart, x, use_reentrant=False)

    return hooked(lambda hidden, out: None, first=first)


@row
def hooks_of_each_backward() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        for a, b in zip(x.chunk(2), y.chunk(2)):
            hidden = model[0](a)
            first = hidden.register_hook(lambda g: g * 2)
            second = hidden.register_hook(lambda g: g + 1)
            loss = F.cross_entropy(model[1:](hidden), b)
            loss.backward(retain_graph=True)
            first.remove()
            loss.square().backward()
            second.remove()
            second.remove()
        opt.step()
        opt.zero_grad()

    return loop(model, opt, step)


@row
def handle_of_a_hook_in_a_list() -> Loop:
    handles: list = []
    return hooked(lambda hidden, out: handles.append(hidden.register_hook(lambda g: g * 2)), lambda: handles.pop().remove())


@ordinary
def handle_of_a_hook_that_outlives_the_step() -> Loop:
    handles: list = []
    return hooked(lambda hidden, out: handles.append(hidden.register_hook(lambda g: g * 2)))


@ordinary
def hook_that_writes() -> Loop:
    """And another that reads it."""
    seen: dict = {}

    def put(hidden, out):
        out.register_hook(lambda g: seen.update(norm=g.norm()))
        hidden.register_hook(lambda g: g * seen["norm"])

    return hooked(put)


@ordinary
def hook_that_asks_for_strides() -> Loop:
    return hooked(lambda hidden, out: hidden.register_hook(lambda g: g * 2 if g.is_contiguous() else g))


def read_by_a_hook(put: Callable, get: Callable) -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        put(1.0)
        hidden = model[0](x)
        hidden.register_hook(lambda g: g * get())
        put(3.0)
        F.cross_entropy(model[1:](hidden), y).backward()
        opt.step()
        opt.zero_grad()

    return loop(model, opt, step)


@ordinary
def hook_that_reads_what_changes() -> Loop:
    state = Settings()
    return read_by_a_hook(lambda value: setattr(state, "scale", value), lambda: state.scale)


@row
def hook_that_reads_a_tensor() -> Loop:
    """Which is the same tensor, with another number by then."""
    scale = torch.ones(())
    return read_by_a_hook(lambda value: scale.fill_(value), lambda: scale)


@ordinary
def hook_in_a_part_of_the_step() -> Loop:
    """The backward is not in its graph."""
    model, state = mlp(), Settings()
    opt = adamw(model)

    def forward(x):
        hidden = model[0](x)
        hidden.register_hook(lambda g: g * state.scale)
        return model[1:](hidden)

    def step(x, y):
        state.scale = 1.0
        out = forward(x)
        torch._dynamo.graph_break()
        state.scale = 3.0
        F.cross_entropy(out, y).backward()
        opt.step()
        opt.zero_grad()

    return loop(model, opt, step)


@ordinary
def gradient_kept_behind_a_hook() -> Loop:
    """Compiled, a hook of a part would come behind what is asked of what that part hands on."""
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        hidden = model[0](x)
        hidden.register_hook(lambda g: g * 0.5)
        hidden.retain_grad()
        F.cross_entropy(model[1:](hidden), y).backward()
        opt.step()
        opt.zero_grad()
        return hidden.grad

    return loop(model, opt, step)


@ordinary
def derivative_behind_a_hook() -> Loop:
    """The same, cut by another line."""
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        hidden = model[0](x)
        hidden.register_hook(lambda g: g * 0.5)
        print(end="")
        loss = F.cross_entropy(model[1:](hidden), y)
        (outer,) = torch.autograd.grad(loss, hidden, retain_graph=True)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return outer

    return loop(model, opt, step)


def behind_a_break(ask: Callable[[Tensor, Tensor], object]) -> Loop:
    """`ask` is given a tensor and a loss that are of one part of the step."""
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        hidden = model[0](x)
        loss = F.cross_entropy(model[1:](hidden), y)
        torch._dynamo.graph_break()
        result = ask(hidden, loss)
        (loss + hidden.square().mean()).backward()
        opt.step()
        opt.zero_grad()
        return result and hidden.grad

    return loop(model, opt, step)


@ordinary
def hook_behind_a_break() -> Loop:
    def ask(hidden, loss):
        hidden.register_hook(lambda g: g * 2)

    return behind_a_break(ask)


@ordinary
def gradient_kept_behind_a_break() -> Loop:
    def ask(hidden, loss):
        hidden.retain_grad()
        return True

    return behind_a_break(ask)
