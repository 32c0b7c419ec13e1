"""Parameters that no optimizer may train, compiled or not, since nothing would say what goes wrong:

- those that no model has any more, as a conversion or a sharding has put others in their place;
- those that were frozen when others were sharded, and are trained now: each rank would go its own way with them;
- those that came to an optimizer of sharded ones later, and have not been sharded: the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, compiler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from .distributed.storage import storage_of
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
LATER = By(OptionError, "memopt.shard_ has not shared, beside others that it has: their gradients are not averaged, and ranks "
           "would part", "let the model have them when shard_ is called; or make an optimizer of their own for them, and "
           "call memopt.shard_(module, its_optimizer, mesh) on their module")
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the old parameter -> its name, and By


def note(p: Tensor, name: str, by: By) -> None:
    """`p` was replaced, or frozen."""
    _check_every_step()
    _known[p] = name, by


def check_optimizers(optimizers: Iterable[Optimizer], where: str) -> None:
    """Refuse an optimizer with a parameter that was replaced, was frozen and is not any more, or is whole beside shards.

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
        given = [p for group in optimizer.param_groups for p in group["params"]]
        later = [p for p in given if storage_of(p) is None and p.requires_grad]
        if later and len(later) < sum(p.requires_grad for p in given):
            raise LATER.error(f"{type(optimizer).__name__} has {len(later)} parameters (of shape {tuple(later[0].shape)} "
                              f"..) that {LATER.what}", where=where, do=LATER.do)


@functools.cache
def _check_every_step() -> None:
    """From now on every optimizer is looked at where its step is not captured, too."""
    @compiler.disable  # in a step that is compiled in pieces it would be traced, and know nothing
    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        check_optimizers([optimizer], "optimizer.step()")

    check.only_checks = True  # type: ignore[attr-defined]
    register_optimizer_step_pre_hook(check)
