"""A step that something cuts in two equals eager, wherever that is. `python tests/capture/cut.py` tries every place."""

from __future__ import annotations

import zlib

import loops
import pytest
import rows
import torch.nn.functional as F
from cut import cut, places
from harness import compiled, largest_difference, train
from loops import CLASSES, WIDTH, Loop, adamw, loop, mlp
from torch import nn

BUILDS = {"plain": loops.plain, **rows.ROWS, **rows.ORDINARY}


def generator_and_critic() -> Loop:
    """Before the first backward the made examples and the critic's loss are one piece, which it uses up."""
    maker, critic = mlp(), nn.Sequential(nn.Linear(CLASSES, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))
    opts = [adamw(critic), adamw(maker)]

    def step(x, y):
        real = F.one_hot(y, CLASSES).to(x.dtype)
        made = maker(x)
        opts[0].zero_grad()
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(made.detach())).mean()
        loss.backward()
        opts[0].step()
        opts[1].zero_grad()
        F.softplus(-critic(made)).mean().backward()
        opts[1].step()
        return loss.detach()

    return Loop(step, [maker, critic], opts)


def hook_of_the_step() -> Loop:
    """Dynamo gives a caller's tensor the hook when its graph has run."""
    model = mlp()
    opt = adamw(model, eps=0.1)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        hook = model[0].weight.register_hook(lambda g: g * 2)
        loss.backward()
        hook.remove()
        opt.step()
        opt.zero_grad()
        return loss

    return loop(model, opt, step)


def hook_of_an_input() -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        x = x.clone().requires_grad_()
        x.register_hook(lambda g: g * 2)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss, x.grad

    return loop(model, opt, step)


ALL = [generator_and_critic, hook_of_the_step, hook_of_an_input, rows.ROWS["two_backwards_that_share_a_sum"]]


def check(build, cut_one) -> None:
    difference, where = largest_difference(train(build), compiled(cut_one)[0])
    assert difference <= 1e-9, f"{where}: {difference:.3e}"


@pytest.mark.parametrize("build, place", [(build, i) for build in ALL for i in range(places(build))],
                         ids=lambda v: getattr(v, "__name__", v))
@pytest.mark.table(8)
def test_everywhere(build, place):
    check(build, cut(build, place))


@pytest.mark.parametrize("build", ALL, ids=lambda v: v.__name__)
def test_not_cut(build):
    check(build, build)


def number(name: str) -> int:
    """A row's own, which stays."""
    return zlib.crc32(name.encode())


@pytest.mark.parametrize("name", [name for name, build in BUILDS.items() if places(build) and number(name) % 3 == 0
                                  and name != "global_read_as_an_attribute_of_its_module"])  # a cut copies globals
@pytest.mark.table(8)
def test_somewhere(name):
    """A third of the rows, each in one place: `cut.py` takes half an hour for all."""
    build = BUILDS[name]
    check(build, cut(build, number(name) // 3 % places(build)))


def test_a_cut_step_is_cut():
    _, made = compiled(cut(loops.plain, 2))
    assert any(c.reason and "graph_break" in c.reason for c in made)
