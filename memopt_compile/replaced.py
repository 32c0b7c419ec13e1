"""Parameters that no optimizer may train, compiled or not, since nothing would say what goes wrong:

- those that no model has any more, as a conversion or a sharding has put others in their place;
- those that were frozen when others were sharded, and are trained now: each rank would go its own way with them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, compiler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from .errors import MemoptError, OptionError, QuantizationError


class By(NamedTuple):
    """What is the matter with them, and what to do about it."""

    error: type[MemoptError]
    what: str
    do: str


CONVERSION = By(QuantizationError, "a conversion of the model has replaced: it would train nothing", "make the optimizer after memopt.quantize_parameters_")
SHARDING = By(OptionError, "memopt.shard_, which was given another optimizer, has replaced: it would train nothing",
              "train the model with one optimizer of several groups; or shard the modules of each optimizer apart, "
              "memopt.shard_(module, its_optimizer, mesh) for each")
FROZEN = By(OptionError, "were frozen when memopt.shard_ was called, so that every rank has its own, whose gradients "
            "are not averaged: ranks would part", "call shard_ while they are trained, and freeze them behind it; or use "
            "stage=3, which shares frozen ones too")
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the old parameter -> its name, and By


def note(p: Tensor, name: str, by: By) -> None:
    """`p` was replaced, or frozen."""
    _check_every_step()
    _known[p] = name, by


def check_optimizers(optimizers: Iterable[Optimizer], where: str) -> None:
    """Refuse an optimizer with a parameter that was replaced, or was frozen and is not any more.

    Raises:
        QuantizationError, OptionError: by what is the matter.
    """
    for optimizer in optimizers:
        old = [_known[p] for group in optimizer.param_groups for p in group["params"] if p in _known
               and (p.requires_grad or _known[p][1] is not FROZEN)]
        if old:
            error, what, do = old[0][1]
            names = ", ".join(name for name, _ in old[:3])
            raise error(f"{type(optimizer).__name__} has {len(old)} parameters ({names} ..) that {what}",
                        where=where, do=do)


@functools.cache
def _check_every_step() -> None:
    """From now on every optimizer is looked at where nothing is compiled, too."""
    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not compiler.is_compiling():  # the driver looks at those that it captures
            check_optimizers([optimizer], "optimizer.step()")

    check.only_checks = True  # type: ignore[attr-defined]
    register_optimizer_step_pre_hook(check)
