"""PyTorch's own list of modules, `module_db`, each in all the configurations it is tested in.

One case is one module class: a step runs every listed configuration on its listed inputs, and
trains their parameters and those of the inputs that can be differentiated, all at once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from check import Case, Training, fill_zeros
from torch import nn
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db
from torch.utils._pytree import tree_leaves, tree_map_only


class Configuration(nn.Module):
    """A module with its inputs; those that require grad are parameters like any other."""

    def __init__(self, info: ModuleInfo, given: ModuleInput) -> None:
        super().__init__()
        made_of = given.constructor_input
        # `module_db` draws FractionalMaxPool's samples in float64 whatever it is asked for.
        samples = {name: value.to(torch.get_default_dtype()) for name, value in made_of.kwargs.items()
                   if name == "_random_samples"}
        self.module = info.module_cls(*made_of.args, **{**made_of.kwargs, **samples})
        self.trained = nn.ParameterList()
        self.fixed: list[torch.Tensor] = []
        self.inputs = tree_map_only(
            torch.Tensor, self._keep, (given.forward_input.args, given.forward_input.kwargs))

    def _keep(self, value: torch.Tensor) -> Any:
        if value.requires_grad:
            self.trained.append(nn.Parameter(value.detach().clone()))
            return _Place(len(self.trained) - 1, True)
        self.fixed.append(value)
        return _Place(len(self.fixed) - 1, False)

    def forward(self) -> torch.Tensor:
        # Copies, because some of the modules work in place, which a leaf cannot bear.
        args, kwargs = tree_map_only(
            _Place, lambda p: self.trained[p.index].clone() if p.trained else self.fixed[p.index],
            self.inputs)
        outputs = tree_leaves(self.module(*args, **kwargs))
        return sum(o.abs().square().sum() / max(o.numel(), 1) for o in outputs
                   if isinstance(o, torch.Tensor) and o.requires_grad)


class _Place:
    def __init__(self, index: int, trained: bool) -> None:
        self.index, self.trained = index, trained


def averages_cumulatively(given: ModuleInput) -> bool:
    """Whether a batch norm has momentum None: it reads its own count of batches as a number."""
    args = given.constructor_input.args
    return len(args) > 2 and args[2] is None


def configurations(info: ModuleInfo, cumulative: bool) -> list[ModuleInput]:
    given = info.module_inputs_func(info, device="cpu", dtype=torch.get_default_dtype(),
                                    requires_grad=True, training=True)
    return [g for g in given if g.forward_input is not None
            and ("BatchNorm" in info.name and averages_cumulatively(g)) is cumulative]


def build(info: ModuleInfo, cumulative: bool = False, part: slice = slice(None)) -> Training:
    model = nn.ModuleList(Configuration(info, g) for g in configurations(info, cumulative)[part])
    model.train()
    if info.is_lazy:
        with torch.no_grad():
            for each in model:
                each()
    fill_zeros(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> torch.Tensor:
        loss = sum(each() for each in model)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return Training(step, [model], [opt])


def cases() -> list[Case]:
    """A case for each module, and one more where a configuration is known to break the graph.
    The many configurations of a Transformer are several steps of a few each."""
    found = []
    for info in module_db:
        given = len(configurations(info, cumulative=False))
        few = 4 if "Transformer" in info.name or "Attention" in info.name else 110
        for start in range(0, given, few):
            name = info.name if few >= given else f"{info.name} ({start // few + 1})"
            found.append(Case(name, partial(build, info, False, slice(start, start + few))))
        if configurations(info, cumulative=True):
            found.append(Case(f"{info.name} (momentum None)", partial(build, info, True)))
    return found
