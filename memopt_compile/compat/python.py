"""What functions and types of Python, NumPy and torch do in a step, where Dynamo refuses it or gives another value.

Checked against torch 2.11 and 2.13.
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch._dynamo import utils
from torch._dynamo.codegen import PyCodegen
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.variables import misc, torch_function, user_defined
from torch._dynamo.variables.functions import UserFunctionVariable, UserMethodVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable
from torch.utils._device import DeviceContext

from . import breaks, shared

SET_ATTRIBUTE = (object.__setattr__, BaseException.__setattr__, types.SimpleNamespace.__setattr__)  # the last it refuses
COPYING = ("torch._dynamo.polyfills.copy", "reduce_ex_user_defined_object")  # what Dynamo of 2.13 has for `__reduce_ex__`


def refuse_drawing(*_: Any) -> None:
    """End the graph where Python's `random` draws: Dynamo's number of it is no number where the step decides by it."""
    breaks.break_graph("Python's random draws a number", "what the step does next may depend on it",
                       "draw it ahead of the forward, or by torch")


def draws(function: Any) -> bool:
    """Whether this is a method of a `random.Random`, which those of the module are."""
    return isinstance(getattr(function, "__self__", None), random.Random)


def refuse_copy(function: Any, owner: Any) -> None:
    """End the graph at a copy by ``__reduce_ex__`` of more than attributes: Dynamo leaves out the items of an
    `OrderedDict`, without a word, and so those of every state_dict."""
    if (function.__module__, function.__name__) != COPYING or owner is None:
        return
    kind = owner.realize().python_type()
    if issubclass(kind, dict | list | set | tuple) or any(
            getattr(kind, name, None) is not getattr(object, name, None) for name in ("__reduce__", "__reduce_ex__")):
        breaks.break_graph(f"a copy of a {kind.__name__}", "torch would leave out what is in it",
                           "copy it outside of the step, or item by item")


def variable(data: Any, requires_grad: bool = False) -> Any:
    """``Variable(tensor)`` of older code."""
    return data.detach().requires_grad_() if requires_grad else data.detach()


def _called_class(original: Callable, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if self.value is torch.autograd.Variable and len(args) == 1 and set(kwargs) <= {"requires_grad"}:
        return UserFunctionVariable(variable).call_function(tx, args, kwargs)
    if self.value is types.MethodType and not kwargs and type(function := args[0].realize()) is UserFunctionVariable:
        return UserMethodVariable(function.fn, args[1])  # by `contextlib.ExitStack`
    if not (args or kwargs) and (one := shared.made(tx, self.value)):
        return one
    return original(self, tx, args, kwargs)


def as_numpy(value: Any) -> Any:
    """What a graph's tensor is to NumPy: of no dimension it is a number, as NumPy's functions return one."""
    array = utils.to_numpy_helper(value)
    return array[()] if getattr(array, "shape", None) == () else array


skip_code(as_numpy.__code__)  # called by what Dynamo has compiled, and not to be compiled


def _import(original: Callable, self: Any, module: str, name: str) -> Any:
    if (module, name) == (utils.__name__, "to_numpy_helper"):
        module, name = as_numpy.__module__, as_numpy.__name__
    return original(self, module, name)


def _check_tensor_all(cond: torch.Tensor, message: Any = None) -> None:
    """`torch._check_tensor_all` without reading a number: the graph itself checks `cond`."""
    torch._assert_async(cond.all(), "a check in the model failed (torch._check_tensor_all)")


def _dispatches(original: Callable, tx: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator or a tensor's method is a mode's to call.

    A default device is a mode of functions that make tensors, and those are looked up elsewhere. Dynamo lets it have all else
    too: ``group["lr"] * 0.9`` would then be a tensor's product, NumPy's numbers are no tensors, and Python's `backward`
    it may not enter.
    """
    state = tx.symbolic_torch_function_state
    if not state.mode_stack or not all(isinstance(mode.value, DeviceContext) for mode in state.mode_stack):
        return original(tx, args, kwargs)
    with mock.patch.object(state, "torch_function_mode_enabled", False):
        return original(tx, args, kwargs)


FORMS = {torch._check_tensor_all: _check_tensor_all}
REPLACED = [(UserDefinedClassVariable, "call_function", _called_class), (PyCodegen, "load_import_from", _import)]


def patches() -> list[Any]:
    """In force while a frame is traced."""
    return [mock.patch.object(user_defined, "is_standard_setattr", lambda method: method in SET_ATTRIBUTE),
            mock.patch.object(torch_function, "can_dispatch_torch_function", functools.partial(
                _dispatches, torch_function.can_dispatch_torch_function)),
            *(mock.patch.object(module, "call_random_fn", refuse_drawing) for module in (user_defined, misc))]
