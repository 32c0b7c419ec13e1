"""All rows, and the optimizers that each train one."""

from __future__ import annotations

from typing import Any

import rows_beside  # noqa: F401  (fills both)
import rows_changes  # noqa: F401  (fills both)
import rows_data_sizes  # noqa: F401  (fills both)
import rows_functions  # noqa: F401  (fills both)
import rows_hooks  # noqa: F401  (fills both)
import rows_leaves  # noqa: F401  (fills ROWS, or ORDINARY before torch 2.12)
import rows_models  # noqa: F401  (fills ROWS)
import rows_names  # noqa: F401  (fills both)
import rows_numbers  # noqa: F401  (fills both)
import rows_optimizers  # noqa: F401  (fills both)
import rows_ordinary  # noqa: F401  (fills ORDINARY)
import rows_python  # noqa: F401  (fills both)
import rows_scaler  # noqa: F401  (fills both)
import rows_schedulers  # noqa: F401  (fills both)
import rows_steps  # noqa: F401  (fills ROWS)
import torch
import torch.nn.functional as F
from loops import CLASSES, ORDINARY, ROWS, WIDTH, Loop, adamw, loop, mlp, plain

__all__ = ["CLASSES", "OPTIMIZERS", "ORDINARY", "ROWS", "WIDTH", "Loop", "autocast", "with_optimizer"]

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1}, "SGD_momentum": {"lr": 0.1, "momentum": 0.9},
    "SGD_nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "SGD_dampening": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
    "SGD_maximize": {"lr": 0.1, "maximize": True, "weight_decay": 0.1},
    "Adam": {"lr": 0.02, "weight_decay": 0.1}, "AdamW": {"lr": 0.02, "amsgrad": True},
    "AdamW_foreach": {"lr": 0.02, "foreach": True}, "AdamW_fused": {"lr": 0.02, "fused": True},
    "Adamax": {"lr": 0.02}, "NAdam": {"lr": 0.02}, "RAdam": {"lr": 0.02},
    "Adadelta": {"lr": 0.5}, "Adagrad": {"lr": 0.05, "lr_decay": 0.1},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True}, "Rprop": {"lr": 0.01},
    "ASGD": {"lr": 0.05}, "Adafactor": {"lr": 0.02}, "Muon": {"lr": 0.02},
}


def with_optimizer(name: str) -> Loop:
    model = mlp()
    kind = getattr(torch.optim, name.split("_")[0])
    parameters = [p for p in model.parameters() if name != "Muon" or p.dim() == 2]
    return plain(model, kind(parameters, **OPTIMIZERS[name]))


def autocast(device: str = "cpu") -> Loop:
    model = mlp()
    opt = adamw(model)

    def step(x, y):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return loop(model, opt, step)
