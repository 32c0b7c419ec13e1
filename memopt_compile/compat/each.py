"""``torch._foreach_add_`` and the like, of a user's optimizer, as the methods of one tensor after the other.

One operator over all parameters needs every gradient at once, so that none is freed before the last is there. And it
wants plain numbers, where a step has a tensor for one that changes from call to call (a learning rate). What scales,
clamps and averages by constants stays one operator here: `passes/canonicalize.py` takes that apart, in less time.
Checked against torch 2.11 and 2.13.
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

from . import fake_value, list_variable

PREFIX = "_foreach_"
TOGETHER = frozenset(("norm", "mul", "div", "add", "sub", "lerp", "clamp_min", "clamp_max"))  # of constants
METHODS = {"maximum": "clamp_min", "minimum": "clamp_max"}  # whose other operand may be a number
KEPT = ("powsum", "mm")  # no tensor has such a method, or several tensors are one operand
BY_NAME = ("alpha", "value", "weight", "dtype")


def taken_apart(tx: Any, function: Any, args: Any, kwargs: dict) -> Any:
    """The result of such a function, called of one tensor after the other; None for any other function."""
    name = getattr(function, "__name__", "")
    if not name.startswith(PREFIX) or not args:
        return None
    given = [each.realize() for each in args]
    named = {key: each.realize() for key, each in kwargs.items()}
    lists = [each for each in (*given, *named.values()) if isinstance(each, BaseListVariable)]
    plain = (name := name.removeprefix(PREFIX)).rstrip("_")
    if given[0] not in lists or len({len(each.items) for each in lists}) > 1 or plain in KEPT:
        return None
    numbers = [each for each in (*given, *named.values()) if isinstance(each, TensorVariable | SymNodeVariable)]
    if plain in TOGETHER and not numbers or plain == "norm":
        return None
    if any(isinstance(each, TensorVariable) and fake_value(each).dim() for each in numbers):
        return None  # a number for each, in one tensor
    if plain in ("addcmul", "addcdiv") and len(given) > 3:
        named["value"] = given.pop()
    given += [named.pop(key) for key in list(named) if key not in BY_NAME]
    method = METHODS.get(plain, plain) + name[len(plain):]

    def of(each: Any, i: int) -> Any:
        return each.items[i].realize() if isinstance(each, BaseListVariable) else each

    results = [of(given[0], i).call_method(tx, method, [of(each, i) for each in given[1:]],
                                           {key: of(each, i) for key, each in named.items()})
               for i in range(len(given[0].items))]
    return ConstantVariable.create(None) if name.endswith("_") else list_variable(results)
