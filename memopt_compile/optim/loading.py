"""Checkpoints: seen to be of the right optimizer, and restored in the types of this one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..quantization.rounding import as_16_bits, from_bytes
from .low_bit import CORRECTION, DRAWS, GRADIENT, compressed
from .settings import check

if TYPE_CHECKING:
    from .base import Optimizer


def saved_parameters(optimizer: Optimizer, state_dict: dict[str, Any]) -> Iterator[tuple]:
    """(saved group, parameter, saved state, new state) of each parameter that has taken a step.

    The new state is what the parameter would begin with, without its memory.
    """
    for mine, group in zip(optimizer.param_groups, state_dict["param_groups"]):
        for p, index in zip(mine["params"], group["params"]):
            saved = state_dict["state"].get(index) or {}
            saved = {name: optimizer.shards.loaded(value, p, optimizer.by_rows(name, p, mine))
                     if isinstance(value, Tensor) else value
                     for name, value in saved.items() if value is not None}
            if CORRECTION in saved:
                saved[CORRECTION] = from_bytes(saved[CORRECTION])
            if saved:
                group = {**optimizer.defaults, **group}  # torch's groups lack what only ours have
                yield group, p, saved, optimizer.first_state(p.detach().to("meta"), group)


def checked(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """`state_dict`, if it is a checkpoint of this optimizer, with this one's `state_bits`.

    Raises:
        OptimizerError: settings or states are missing, unknown, or of another shape.
    """
    remedy = f"load a checkpoint of {type(optimizer).__name__}"
    if missing := {"state", "param_groups"} - state_dict.keys():
        raise optimizer.error(f"the checkpoint has no {', '.join(sorted(missing))}", remedy)
    for group in state_dict["param_groups"]:
        if missing := optimizer.required - group.keys():
            raise optimizer.error(f"the checkpoint has no {', '.join(sorted(missing))}", remedy)
        check(optimizer, {**optimizer.defaults, **group, **optimizer.flags})
    groups = [dict(group) for group in state_dict["param_groups"]]
    for group, mine in zip(groups, optimizer.param_groups):
        for name in ("state_bits", "weight_bits", "gradient_bits"):  # how things are kept here, no hyperparameters
            group[name] = mine[name]
    state_dict = {**state_dict, "param_groups": groups}
    for _, _, saved, new in saved_parameters(optimizer, state_dict):
        ours = {"step", CORRECTION, DRAWS, GRADIENT}
        if GRADIENT in new:  # a mini-batch has begun, and its sum has a place here
            ours.add("folded")
        strange = saved.keys() - optimizer.state_names - ours
        # torch's SGD counts no steps: where it has a buffer it has taken one.
        missing = new.keys() - saved.keys() - ours
        if strange or missing:
            names = ", ".join(sorted(strange or missing))
            raise optimizer.error(f"the checkpoint has {'a' if strange else 'no'} state {names}",
                                  remedy)
        for name, value in new.items():
            shape = getattr(saved.get(name), "shape", value.shape)
            if shape != value.shape:
                raise optimizer.error(f"the checkpoint's {name} has shape {tuple(shape)}, the "
                                      f"parameter's {tuple(value.shape)}", remedy)
    return state_dict


def restore(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Give every loaded tensor the type and the device that the state has in this optimizer."""
    for group, p, saved, new in saved_parameters(optimizer, state_dict):
        here = optimizer.shards.local(p)
        formats = optimizer.formats(here, group)
        if CORRECTION in new:
            low = as_16_bits(saved.get(CORRECTION, torch.zeros(here.shape, dtype=torch.int16)))
            saved[CORRECTION] = low >> 8 if new[CORRECTION].dtype == torch.int8 else low
        else:
            optimizer.state[p].pop(CORRECTION, None)
        if DRAWS in new:
            saved.setdefault(DRAWS, here.draws.clone())
        if GRADIENT in new:
            saved.setdefault(GRADIENT, torch.zeros_like(here))
        for name in {DRAWS, GRADIENT, f"{GRADIENT}_scale"} - new.keys() - formats.keys():
            optimizer.state[p].pop(name, None)
        for name, like in new.items():
            if name in formats:
                full = saved[name].to(p.device)
                optimizer.state[p].update(compressed({name: full}, {name: formats[name]}))
                continue
            value = saved.get(name, 1.0)  # only a step may be missing: see `checked`
            if not isinstance(value, Tensor):
                value = torch.tensor(float(value))
            device = p.device if like.device.type == "meta" else like.device
            loaded = optimizer.state[p].get(name)
            if not isinstance(loaded, Tensor) or optimizer.shards.ranks > 1 or (
                    loaded.dtype, loaded.device) != (like.dtype, device):
                optimizer.state[p][name] = value.to(device, like.dtype)
