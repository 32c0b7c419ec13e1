"""Ways people write a training step, each as a function that builds one.

A row is called with a seeded random state and returns a `Loop`: the step, what it trains, and
what happens around it. Eager and compiled runs each build their own from the same seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def both_and(answer: Callable[[], Any]) -> Callable:
    """For `Loop.wrap`: what the step returns, and `answer` behind it."""
    def wrap(step: Callable, compile: Callable) -> Callable:
        compiled = compile(step)
        return lambda *args: (compiled(*args), answer())

    return wrap
