"""PyTorch's own list of optimizers, `optim_db`, in every configuration it is tested in.

Each trains a small network with dense gradients (SparseAdam an embedding with sparse ones). On
top of the listed configurations come the three ways to run an update: one tensor at a time,
`foreach` and `fused`.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from check import Case, Training
from torch import nn
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

WIDTH, CLASSES, BATCH = 12, 4, 6


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, CLASSES, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((x.abs() * 10).long() % 16).mean(1)


def build(info: OptimizerInfo, kwargs: dict[str, Any]) -> Training:
    sparse = info.only_supports_sparse_grads
    model = Lookup() if sparse else nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES))
    weights = [p for p in model.parameters() if info.optim_cls.__name__ != "Muon" or p.dim() == 2]
    opt = info.optim_cls(weights, **copy.deepcopy(kwargs))
    batches = [(torch.randn(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,))) for _ in range(8)]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    def step_with_closure(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def closure() -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return opt.step(closure)

    return Training(step_with_closure if info.step_requires_closure else step, [model], [opt],
                    lambda i: batches[i])


def cases() -> list[Case]:
    found = []
    for info in optim_db:
        name = info.optim_cls.__name__
        given = [(i.desc, i.kwargs) for i in info.optim_inputs_func(device="cpu")]
        ways = [way for way in ("foreach", "fused") if way == "foreach"
                and way in info.supported_impls or way == "fused" and "cpu" in info.supports_fused_on]
        base = {"lr": 0.01} if name != "LBFGS" else {}
        given += [(way, {**base, way: True}) for way in ways]
        if ways:
            given.append(("one tensor at a time", {**base, "foreach": False}))
        for desc, kwargs in given:
            found.append(Case(f"{name}: {desc}", partial(build, info, kwargs)))
    return found
