"""Results of a compiled piece that others of its results are computed from (``hidden, out = first(x), rest(first(x))``).

AOTAutograd makes one node of the piece, and what goes through it from `out` to `hidden` is no gradient of `hidden` for autograd: a hook
there is given what comes from elsewhere only, or None, `retain_grad` keeps that, and `torch.autograd.grad` finds no way. torch.compile
trains by such gradients without a word. So a piece runs uncompiled where the code around it names these, and a hook that comes from
elsewhere is refused. Left: `retain_grad` and `torch.autograd.grad` in functions that are found by no name (``table[i](hidden)``).
"""

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
from collections import ChainMap
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx

from . import second_derivative
from .compat import breaks
from .errors import CaptureError

NAMES = ({"register_hook"}, {"retain_grad"}, {"autograd", "grad"})
LIBRARIES = (sysconfig.get_path("stdlib"), torch.__path__[0], __file__.removesuffix("inner_results.py"))
REMEDY = "compile the whole step, or leave the function that computes the tensor out with torch.compiler.disable"


def positions(gm: fx.GraphModule) -> list[int]:
    """Which results others are computed from, by an operation that autograd follows."""
    results = gm.graph.output_node().args[0]
    followed, stack = set(), [node for node in results if _is_followed(node)]
    while stack:
        for node in filter(_is_followed, stack.pop().all_input_nodes):
            if node not in followed:
                followed.add(node)
                stack.append(node)
    return [i for i, node in enumerate(results) if node in followed and node.op != "placeholder"]


def _is_followed(node: Any) -> bool:
    return isinstance(node, fx.Node) and getattr(node.meta.get("example_value"), "requires_grad", False)


def asked_for_by(output: Any) -> str:
    """What in the function traced into `output`, in those that call it, or in theirs asks for gradients of such results: a name, and where."""
    scopes, frame = [breaks.frame_of(output)], sys._getframe()
    while (frame := frame.f_back) is not None:
        scopes.append((frame.f_code, ChainMap(frame.f_locals, frame.f_globals)))
    seen: set[CodeType] = set()
    return next((found for code, scope in scopes if (found := _asks(code, scope, seen))), "")


def _asks(code: CodeType, scope: Mapping[str, Any], seen: set[CodeType]) -> str:
    if code in seen or code.co_filename.startswith(LIBRARIES):
        return ""
    seen.add(code)
    for names in NAMES:
        if names <= set(code.co_names):
            return f"`{'.'.join(sorted(names))}` in {code.co_name}"
    inner = [(each, scope) for each in code.co_consts if isinstance(each, CodeType)]
    for name in (*code.co_names, *code.co_freevars):
        function = scope[name] if name in scope else inspect.getattr_static(type(scope.get("self")), name, None)
        if isinstance(function, FunctionType) and isinstance(function := inspect.unwrap(function), FunctionType):
            inner.append((function.__code__, ChainMap(breaks.closed_over(function.__code__, function.__closure__), function.__globals__)))
    return next((found for each in inner if (found := _asks(*each, seen))), "")


def without_hooks(run: Callable, inner: list[int], where: str) -> Callable:
    """`run`, whose results refuse a hook that would be given another gradient than in eager."""
    if not inner:
        return run

    def register(numbers: set[int], tensor: Tensor) -> None:
        if tensor.output_nr in numbers:
            raise CaptureError("a hook is registered on a tensor that a compiled piece goes on from: it would not be given all of "
                               "the gradient", where=where, do=REMEDY)
        type(tensor.grad_fn)._register_hook_dict(tensor.grad_fn, tensor)

    @functools.wraps(run)
    def guarded(*inputs: Any) -> Any:
        outputs = run(*inputs)
        if made := second_derivative.backward_of(inputs, outputs):
            node, position = made
            numbers = {number for number, k in position.items() if k in inner}
            node._register_hook_dict = functools.partial(register, numbers)  # no reference to the node, which would be a cycle
        return outputs

    return guarded
