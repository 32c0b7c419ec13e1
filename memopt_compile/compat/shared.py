"""What a step writes by one name and reads by another, which Dynamo keeps apart: a step that asks would go the other way
without a word.

1. Objects that have one `__dict__` (``self.__dict__ = self._shared_state``, as Accelerate's states do) are one here, with guards that
   they still are.
2. What is written to a class (``Trainer.calls += 1``) is what its objects and the classes derived from it have.
3. Globals of the step's own module are what that has as attributes.
4. What torch 2.13 notes of an object's attributes outlives a function that it traces apart (a hook, a branch of `torch.cond`), behind
   which it would write to notes that are thrown away: ``self.scale = 2.0`` was lost, for the step and for good.

Checked against torch 2.11 and 2.13.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import AttrSource, GlobalSource
from torch._dynamo.variables import dicts
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import UserMethodVariable
from torch._dynamo.variables.misc import PythonModuleVariable
from torch._dynamo.variables.user_defined import (
    UserDefinedClassVariable,
    UserDefinedObjectVariable,
)

from . import breaks, guard_value


def wrap(original: Callable, builder: Any, value: Any) -> Any:
    """`VariableBuilder._wrap`."""
    own = any("__dict__" in vars(kind) for kind in type(value).__mro__) and not isinstance(value, torch.nn.Module | torch.Tensor)
    held, known = vars(value) if own else None, _known(builder.tx)
    first, variable = known.get(id(held), (value, None))
    if first is value:
        variable = original(builder, value)
        if isinstance(held, dict) and isinstance(variable, UserDefinedObjectVariable):
            known[id(held)] = value, variable
        return variable
    if type(first) is not type(value):
        breaks.break_graph("objects of two classes have one __dict__", "Dynamo would keep them apart",
                           "read and write one of them in the step")
    place = id(held)
    for source in (variable.source, builder.source):
        guard_value(source, lambda each: id(vars(each)) == place, "objects that have one __dict__")
    return variable


def _known(tx: Any) -> dict[int, tuple[Any, Any]]:
    """Objects of the trace and their variables, by the place of their `__dict__`."""
    return vars(tx.output).setdefault("memopt_dicts", {})


def made(tx: Any, kind: type) -> Any:
    """``State()`` in a step, of a class that gives all its objects one `__dict__`: one of them, if to make one changes nothing."""
    init = getattr(kind, "__init__", None)
    if "__dict__" not in getattr(getattr(init, "__code__", None), "co_names", ()):
        return None
    one = kind()
    before = dict(vars(one))
    if not before or vars(kind()) is not vars(one) or any(vars(one).get(name, before) is not value for name, value in before.items()):
        return None
    if id(vars(one)) in _known(tx):
        return _known(tx)[id(vars(one))][1]
    return VariableTracker.build(tx, one, GlobalSource(tx.output.install_global("memopt_shared", one)))


def _written_to_class(tx: Any, kinds: tuple, name: str) -> Any:
    """What the trace has written to the first of these classes that has such an attribute; None if that has its own still."""
    effects = tx.output.side_effects
    for kind in kinds:
        variable = effects.id_to_variable.get(id(kind))
        if variable is not None and effects.has_pending_mutation_of_attr(variable, name):
            return effects.load_attr(variable, name)
        if name in vars(kind):
            return None
    return None


def _of_object(original: Callable, self: Any, tx: Any, name: str) -> Any:
    if _are_classes_written(tx.output) and name not in getattr(self.value, "__dict__", ()) and not (
            tx.output.side_effects.has_pending_mutation_of_attr(self, name)):
        if (written := _written_to_class(tx, type(self.value).__mro__, name)) is not None:
            return written
    return original(self, tx, name)


def _of_class(original: Callable, self: Any, tx: Any, name: str) -> Any:
    if _are_classes_written(tx.output):
        if name == "__dict__" and self in tx.output.side_effects.store_attr_mutations:
            breaks.break_graph("the __dict__ of a class that is written to", "Dynamo reads the old one", "read the attribute itself")
        if (written := _written_to_class(tx, self.value.__mro__, name)) is not None:
            return written
    result = original(self, tx, name)
    if self.source and result.source is None and name in vars(self.value) and (
            ConstantVariable.is_literal(own := vars(self.value)[name])):
        return VariableTracker.build(tx, own, AttrSource(self.source, name))  # torch 2.11 guards none of these
    return result


def _of_module(original: Callable, self: Any, tx: Any, name: str) -> Any:
    effects = tx.output.side_effects
    if vars(self.value) is tx.output.global_scope:
        known = effects.id_to_variable.get(id(tx.output.root_tx.symbolic_globals.get(name, effects)))
        if known is not None and effects.has_pending_mutation_of_attr(known, name):
            return effects.load_global(known, name)
    return original(self, tx, name)


def _are_classes_written(output: Any) -> bool:
    return "memopt_classes" in vars(output)


def _store_attr(original: Callable, effects: Any, item: Any, name: str, *value: Any) -> None:
    output = breaks.traced_now()
    if name == "__dict__":
        breaks.break_graph("an object is given another __dict__", "Dynamo would go on with its own",
                           "make the object outside of the step")
    if isinstance(item, PythonModuleVariable) and vars(item.value) is output.global_scope:
        breaks.break_graph("a global of the step's own module is written as an attribute", "Dynamo would read the old one",
                           "declare it global, and assign it")
    if isinstance(item, UserDefinedClassVariable):
        output.memopt_classes = True
    if isinstance(item, UserDefinedObjectVariable) and isinstance(
            own := inspect.getattr_static(type(item.value), name, None), property) and own.fset:
        UserMethodVariable(own.fset, item).call_function(output.root_tx, [*value], {})  # torch 2.11 calls none
        return None
    return original(effects, item, name, *value)


def patches() -> list[Any]:
    """In force while a frame is traced."""
    notes = getattr(dicts, "SideEffectsProxyDict", None)  # 2.13
    now = property(lambda self: breaks.traced_now().side_effects, lambda self, value: None)
    return [mock.patch.object(notes, "side_effects", now, create=True)] if notes else []


REPLACED = [(SideEffects, "store_attr", _store_attr), (UserDefinedObjectVariable, "var_getattr", _of_object),
            (UserDefinedClassVariable, "var_getattr", _of_class), (PythonModuleVariable, "var_getattr", _of_module)]
