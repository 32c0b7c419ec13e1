"""What decides what a step does, and Dynamo does not ask for. Checked against torch 2.11 and 2.13."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.exc import ObservedAttributeError
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import dicts
from torch._dynamo.variables.constant import ConstantVariable

from . import (
    LazyVariableTracker,
    TensorVariable,
    UserDefinedObjectVariable,
    UserDefinedVariable,
    UserFunctionVariable,
    UserMethodVariable,
    constant_value,
    fake_value,
    guard_value,
    traced_without_grad,
)

GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks")
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR,
          "critical": logging.CRITICAL}


def call_module(original: Callable, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """A module's call, guarded on the hooks of all modules: Dynamo asks whether there are any, and guards the module's
    own only."""
    hooks = tx.import_source("torch.nn.modules.module")
    for name in GLOBAL_HOOKS:
        install_guard(AttrSource(hooks, name).make_guard(GuardBuilder.SEQUENCE_LENGTH))
    return original(self, tx, args, kwargs)


def is_the_same_tensor(original: Callable, guard: Any) -> bool:
    """Whether a tensor is guarded by its identity, as the key of a dict is. Dynamo has the gradient of a parameter that
    is a key of `optimizer.state` for one too: every backward makes another."""
    source = guard.originating_source
    if isinstance(source, AttrSource) and source.member == "_local_tensor":  # the rows of a DTensor
        source = source.base
    return not (isinstance(source, AttrSource) and source.member == "grad") and original(guard)


def call_checkpoint(original: Callable, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """A reentrant checkpoint none of whose tensors needs a gradient: eager gives none to the parameters in it either.
    Dynamo takes every checkpoint for one that is not reentrant."""
    reentrant = "use_reentrant" not in kwargs or constant_value(kwargs["use_reentrant"]) in ((True, True), (True, None))
    given = [a.realize() for a in args[1:]]
    if not reentrant or any(isinstance(a, TensorVariable) and fake_value(a).requires_grad for a in given):
        return original(self, tx, args, kwargs)
    with traced_without_grad(tx):
        return args[0].call_function(tx, args[1:], {})


def guard_methods(optimizer: Any) -> None:
    """What an optimizer's `step` and `zero_grad` are, on itself and on its class: capture looks them up itself."""
    def methods(value: Any) -> list:
        return [found for name in ("step", "zero_grad") for found in (
            vars(value).get(name), getattr(type(value), name, None))]

    if optimizer.source is not None:
        known = methods(optimizer.value)
        guard_value(optimizer.source, lambda value: all(a is b for a, b in zip(methods(value), known)),
                    "the same step and zero_grad")


def guard_classes(tx: Any, owner: Any, function: Any) -> None:
    """That a class still has this method, which is called of `owner`: Dynamo guards what the object itself has in place of
    one. One guard for all methods of the frame."""
    if isinstance(owner, LazyVariableTracker) and not owner.is_realized():
        return
    owner = owner.realize()
    if not isinstance(owner, UserDefinedVariable) or owner.source is None or isinstance(owner.value, dict):
        return  # of a dict torch 2.11 guards nothing but its items
    place = _place_of(function, owner.value if isinstance(owner.value, type) else type(owner.value))
    if place is None:
        return
    known = vars(tx.output).setdefault("memopt_methods", {})
    if not known:
        guard_value(owner.source, lambda _: all(_method(kind, name) is each for (kind, name), each in known.items()),
                    "the same methods of classes")
    known[place] = function


def _method(kind: type, name: str) -> Any:
    found = getattr(kind, name, None)
    return getattr(found, "__func__", found)  # of a class method


def _place_of(function: Any, kind: type) -> tuple[type, str] | None:
    """The class, `kind` or one that it inherits from, and the name under which it has `function` as a method."""
    if _method(kind, name := function.__name__) is function:
        return kind, name
    return next(((each, name) for each in kind.__mro__ for name, value in vars(each).items()
                 if getattr(value, "__func__", value) is function), None)


def has_step_of_its_own(optimizer: Any) -> bool:
    """Whether somebody has put a `step` on this very object; a scheduler's only counts."""
    step = vars(optimizer).get("step")
    return step is not None and not hasattr(step, "_wrapped_by_lr_sched")


def saved_tensors_are_hooked(source: Any) -> bool:
    """Whether the caller has hooks on what autograd saves (``with saved_tensors_hooks(...)``); guarded at `source`."""
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    guard_value(source, lambda _: (torch._C._autograd._top_saved_tensors_default_hooks(True) is not None) is hooked,
                "hooks on saved tensors")
    return hooked


def says_nothing(logger: Any, method: str) -> bool:
    """Whether a method of a plain logger is one for messages that its level, or `logging.disable`, keeps unsaid; guarded."""
    value, level = logger.value, LEVELS.get(method)
    own = any(name in vars(value) or getattr(type(value), name) is not getattr(logging.Logger, name)
              for name in ("isEnabledFor", method)) if level else True
    if own or logger.source is None or value.isEnabledFor(level):
        return False
    guard_value(logger.source, lambda value: not value.isEnabledFor(level), f"messages of level {level} are not said")
    return True


def _without_attribute(original: Callable, self: Any, tx: Any, name: str) -> Any:
    """An attribute of a user's object. That there is none (``except AttributeError``) is guarded."""
    try:
        return original(self, tx, name)
    except ObservedAttributeError:
        finds = getattr(type(self.value), "__getattr__", None) not in (None, torch.nn.Module.__getattr__)
        if not (self.source is None or finds or isinstance(self.value, dict) or hasattr(type(self.value), name)
                or hasattr(self.value, name)):
            guard_value(self.source, lambda value: not hasattr(value, name), f"no attribute {name}")
        raise


def _function_has(original: Callable, self: Any, tx: Any, name: str) -> Any:
    """``hasattr(function, name)``, guarded. A method has what it is bound to too, of which Dynamo knows nothing."""
    bound = isinstance(self, UserMethodVariable)
    has = hasattr(types.MethodType(self.fn, self) if bound else self.fn, name)
    if self.source is not None:
        guard_value(self.source, lambda function: hasattr(function, name) is has, f"an attribute {name}, or none")
    return ConstantVariable.create(has) if bound else original(self, tx, name)


def _guard_dict(variable: Any, what: Callable[[dict], Any]) -> None:
    """What is asked of an object's ``__dict__``, or a function's (by `functools.wraps`). Dynamo, which keeps account of what the step changes in it, guards none."""
    owner = variable.items.item
    value = owner.fn if isinstance(owner, UserFunctionVariable) else getattr(owner, "value", None)
    if owner.source is not None and hasattr(value, "__dict__") and not isinstance(value, dict):
        known = what(vars(value))
        guard_value(owner.source, lambda value: what(vars(value)) == known, "the same attributes")


def _keys_of_an_object(original: Callable, self: Any) -> None:
    _guard_dict(self, list)


def _key_of_an_object(original: Callable, self: Any, tx: Any, args: Any) -> None:
    if args[0].is_python_constant():
        key = args[0].as_python_constant()
        _guard_dict(self, lambda found: key in found)


REPLACED = [(UserDefinedObjectVariable, "var_getattr", _without_attribute),
            (UserFunctionVariable, "call_obj_hasattr", _function_has)]
if DunderDict := getattr(dicts, "DunderDictVariable", None):  # 2.13
    REPLACED += [(DunderDict, "install_dict_keys_match_guard", _keys_of_an_object),
                 (DunderDict, "install_dict_contains_guard", _key_of_an_object)]
