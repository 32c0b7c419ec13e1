"""Objects that are one: several that have one `__dict__` (``self.__dict__ = self._shared_state``, as Accelerate's states do).

Dynamo keeps what a step writes to each object apart, so that ``b.flag`` would not show what is written to ``a.flag``, and
a step that asks would go the other way without a word. Here such objects are one to it, with guards that they still are.
Checked against torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import GlobalSource
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

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


def _store_attr(original: Callable, effects: Any, item: Any, name: str, *value: Any) -> None:
    if name == "__dict__":
        breaks.break_graph("an object is given another __dict__", "Dynamo would go on with its own",
                           "make the object outside of the step")
    return original(effects, item, name, *value)


REPLACED = [(SideEffects, "store_attr", _store_attr)]
