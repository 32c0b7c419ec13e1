"""Parameters of many shapes, gradients for them, and the difference between two results."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import memopt_compile as memopt

SHAPES = [(8, 5), (7,), (4, 3, 3, 3), (), (2, 3, 4), (6, 1), (1, 1)]
# One of each class: what holds for all optimizers is tested with these.
MAKERS: dict[str, Callable[[Iterable], memopt.optim.base.Optimizer]] = {
    "SGD": lambda p: memopt.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD dampened": lambda p: memopt.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "SGD plain": lambda p: memopt.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "SGD Nesterov": lambda p: memopt.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: memopt.optim.Adam(p, lr=0.02, weight_decay=0.1),
    "AdamW": lambda p: memopt.optim.AdamW(p, lr=0.02, amsgrad=True, maximize=True),
    "Adafactor": lambda p: memopt.optim.Adafactor(p, lr=0.02, weight_decay=0.1),
    "CAME": lambda p: memopt.optim.CAME(p, lr=0.02, weight_decay=0.1),
    "CAME auto": lambda p: memopt.optim.CAME(p, lr=0.02, factor_dims="auto"),
    "AdamA": lambda p: memopt.optim.AdamA(p, lr=0.02, weight_decay=0.1, v_scale=2.0),
}


def parameters(shapes: Iterable[tuple] = SHAPES, dtype: torch.dtype = torch.float64,
               seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype))
            for s in shapes]


def give_gradients(ps: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in ps:
        p.grad = (torch.randn(p.shape, generator=generator, dtype=torch.float64) * scale).to(p.dtype)


def fold_and_step(opt: Any, ps: list[nn.Parameter], parts: list[list[Tensor]], last: bool) -> None:
    """A mini-batch in `parts`, lists of gradients; `step` folds the last one itself unless `last`."""
    for i, part in enumerate(parts):
        for p, g in zip(ps, part):
            p.grad = g.clone()
        if last or i < len(parts) - 1:
            opt.accumulate()
            assert all(p.grad is None for p in ps)
    opt.step()


def train(make: Callable, steps: int = 6, first: int = 100, ps: Any = None,
          **settings: Any) -> tuple[list[nn.Parameter], Any]:
    """Parameters after `steps` steps, and the optimizer."""
    ps = parameters(**settings) if ps is None else ps
    opt = make(ps)
    for i in range(first, first + steps):
        give_gradients(ps, i)
        opt.step()
    return ps, opt


def saved_and_loaded(ps: list[nn.Parameter], old: Any, make: Callable) -> tuple[list, Any]:
    """Copies of `ps`, and an optimizer for them with the state of `old` out of a file."""
    file = io.BytesIO()
    torch.save(old.state_dict(), file)
    file.seek(0)
    copies = copy.deepcopy(ps)
    new = make(copies)
    new.load_state_dict(torch.load(file, weights_only=True))
    return copies, new


def difference(a: list[Any], b: list[Any]) -> float:
    """The largest relative difference of pairs of tensors."""
    def one(x: Tensor, y: Tensor) -> float:
        x, y = x.detach().double(), y.detach().double()
        return float((x - y).abs().max() / x.abs().max().clamp(min=1e-30)) if x.numel() else 0.0

    assert len(a) == len(b)
    return max((one(x, y) for x, y in zip(a, b)), default=0.0)


def states(opt: torch.optim.Optimizer) -> list[Tensor]:
    """Every tensor of the state, in order."""
    return [value for group in opt.param_groups for p in group["params"] if p in opt.state
            for _, value in sorted(opt.state[p].items()) if isinstance(value, Tensor)]
