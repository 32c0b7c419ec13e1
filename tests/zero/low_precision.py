"""What two ranks do with parameters in low precision, for `test_low_precision_shards`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import cases
import torch
import torch.nn.functional as F
from ranks import thinned
from test_sharding import says
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh

import memopt_compile as memopt
from memopt_compile.optim import SGD, AdamA, AdamW

DOUBLE = torch.float64


class Blocks(nn.Module):
    """Rows that two ranks do not divide, one of no more than one row, and no dimension. Rows of matrices are
    whole groups of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5, bias=False)
        self.scale, self.row = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x)) * self.scale + self.row)


def low(bits: int, group_size: int, skip: str | tuple = ()) -> nn.Module:
    return memopt.quantize_parameters_(Blocks(), bits, group_size, skip=skip)


def momentum(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, state_bits=8, **settings)


def adama(model: nn.Module) -> torch.optim.Optimizer:
    return AdamA(model.parameters(), lr=0.02, state_bits=8)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


# Each rank's rows are whole groups: (model, stage, optimizer, how).
WHOLE = partial(low, 12, 8, "first.*")
KINDS: dict[str, tuple[Callable, int, Callable, dict]] = dict(thinned([
    ("gradients", (partial(low, 8, 8, "first.*"), 1, partial(momentum, gradient_bits=8), {"micro": 2, "fold": True})),
    ("adama", (WHOLE, 2, adama, {"micro": 2, "fold": True})),
    ("momentum", (WHOLE, 3, momentum, {})),
]))
UNEVEN = partial(low, 10, 2048)  # groups of other elements than in one process


def everything(rank: int, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: cases.trained(rank, ranks, stage, kind, DOUBLE, optimizer, measured=12 * (name == "momentum"), **how)
        for name, (kind, stage, optimizer, how) in KINDS.items()}
    found["uneven"] = cases.trained(rank, ranks, 3, UNEVEN, DOUBLE, adamw)
    mesh = init_device_mesh("cpu", (ranks,))
    model, opt = _trained_in_eager(rank, ranks, mesh)
    found["uneven in eager"] = cases.whole(model)
    found["draws"] = {name: int(p.to_local().draws) for name, p in model.named_parameters()}
    found["forms"] = {name: p.to_local().form for name, p in model.named_parameters()}
    state, states = get_state_dict(model, opt)
    again = cases.made(UNEVEN, DOUBLE)
    other = adamw(again)
    memopt.shard_(again, other, mesh, stage=1)
    again.load_state_dict(state)
    other.load_state_dict(opt.state_dict())
    found["loaded"] = cases.whole(again)
    found["stored"] = {type(value.to_local()) for value in state.values()}
    found["refused"] = says(lambda: memopt.dequantize_parameters_(model))
    return found


def _trained_in_eager(rank: int, ranks: int, mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = cases.made(UNEVEN, DOUBLE)
    opt = adamw(model)
    memopt.shard_(model, opt, mesh, stage=3)
    step = cases.step_of(model, opt)
    for x, y in cases.batches(rank, ranks, DOUBLE):
        step(x, y)
    return model, opt
