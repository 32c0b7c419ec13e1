"""Schedulers that a step calls (``scheduler.step()``), which torch does not trace: they are called behind the graph.

There Dynamo would end the graph, which it cannot within a loop over schedulers, or a ``with`` as that of Accelerate's
`accumulate`. A scheduler of torch's writes numbers of Python's, which the graph that is there has read by then; so its call
can wait for the end, if nothing that is traced behind it reads or writes what it may: its optimizer's groups, but for their
parameters, and the scheduler. Where anything does, the step is traced again, with the graph ended there.

Before:  opt.step(); scheduler.step(); opt.zero_grad(); return loss
After:   opt.step(); opt.zero_grad(); loss = ...; scheduler.step(); return loss

Checked against torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._dynamo.bytecode_transformation import create_call_method, create_instruction
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

from . import breaks

MODULE = torch.optim.lr_scheduler.__name__


def _no_more(output: Any) -> NoReturn:
    """Trace the step again, with the graph ended at a scheduler's step."""
    vars(output.root_tx.speculation_log)["memopt_ends_at_schedulers"] = True
    breaks.restart(output, "what a scheduler may write is read or written behind its step")


class _Waits(VariableTracker):
    """In a group's place of a number that the scheduler has yet to write."""

    def python_type(self) -> Any:
        _no_more(breaks.traced_now())

    reconstruct = var_getattr = call_method = as_proxy = is_python_constant = lambda self, *args, **kwargs: self.python_type()


class _Scheduler(UserDefinedObjectVariable):
    """One whose step waits: of it nothing but another step is known."""

    def var_getattr(self, tx: Any, name: str) -> Any:
        return super().var_getattr(tx, name) if name == "step" else _no_more(tx.output)


def calls(output: Any) -> list[tuple[Any, list]]:
    """Schedulers whose step waits, in order, and the dicts that it may write."""
    return vars(output).setdefault("memopt_calls", [])


def _with_parts(scheduler: Any) -> list[Any]:
    return [scheduler, *(part for each in getattr(scheduler, "_schedulers", ()) for part in _with_parts(each))]


def put_off(tx: Any, scheduler: Any) -> Any:
    """The result of ``scheduler.step()``, which is called behind the graph; None if it cannot wait."""
    scheduler, effects = scheduler.realize(), tx.output.side_effects
    if (scheduler.source is None or not isinstance(scheduler, UserDefinedObjectVariable)
            or not breaks.is_outermost(tx.output) or "memopt_ends_at_schedulers" in vars(tx.speculation_log)):
        return None
    read = UserDefinedObjectVariable.var_getattr
    groups = [group.realize() for group in read(read(scheduler, tx, "optimizer").realize(), tx, "param_groups").realize().items]
    known = [effects.id_to_variable[id(part)] for part in _with_parts(scheduler.value) if id(part) in effects.id_to_variable]
    if any(map(effects.is_modified, [*known, *groups])):
        return None
    for group in groups:
        group.items.update({key: _Waits() for key in group.items if key.vt.as_python_constant() != "params"})
    for each in known:
        each.__class__ = _Scheduler
    calls(tx.output).append((scheduler, groups))
    return ConstantVariable.create(None)


def is_known(output: Any, value: Any, variable: Any) -> Any:
    """The variable of an object; where that is a part of a scheduler whose step waits, nothing else is known of it."""
    if any(value is part for scheduler, _ in calls(output) for part in _with_parts(scheduler.value)):
        variable.__class__ = _Scheduler
    return variable


def call_them(codegen: Any) -> None:
    """At the end of all that Dynamo writes behind a graph."""
    effects, waiting = codegen.tx.output.side_effects, calls(codegen.tx.output)
    if any(effects.is_modified(each) for scheduler, groups in waiting for each in (scheduler, *groups)):
        _no_more(codegen.tx.output)
    for scheduler, _ in waiting:
        codegen(scheduler.source)
        codegen.load_method("step")
        codegen.extend_output([*create_call_method(0), create_instruction("POP_TOP")])


def _is_empty(original: Callable, effects: Any) -> bool:
    return original(effects) and not calls(breaks.traced_now())


REPLACED = [(SideEffects, "is_empty", _is_empty)]
