"""Branches of a step that raise on data: ``if not math.isfinite(loss.item()): sys.exit(1)``, ``assert loss < 10``.

Dynamo ends the graph where the value of a tensor decides. If one side of the branch can only raise, the other is traced,
and the graph checks that it is the one. Checked against torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import math
import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._dynamo.symbolic_convert import (
    InliningGeneratorInstructionTranslator,
    InliningInstructionTranslator,
    InstructionTranslator,
    InstructionTranslatorBase,
)
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.tensor import NumpyNdarrayVariable, SymNodeVariable, TensorVariable

from . import constants, decided, fake_value, traced_without_grad
from .breaks import break_graph

JUMPS = ("POP_JUMP_IF", "POP_JUMP_FORWARD_IF", "POP_JUMP_BACKWARD_IF")
TRANSLATORS = (InstructionTranslatorBase, InstructionTranslator, InliningInstructionTranslator,
               InliningGeneratorInstructionTranslator)
# Handlers that Python makes for a `with`, and behind it. Any other may catch.
WITH = (["PUSH_EXC_INFO", "WITH_EXCEPT_START"], ["COPY", "POP_EXCEPT", "RERAISE"])
ENDS = {"sys": (sys, {"exit"}), "os": (os, {"_exit", "abort"})}
ASKED = {getattr(module, name): getattr(torch, name) for module in (math, np) for name in ("isfinite", "isnan", "isinf")}
ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.neg, operator.eq, operator.ne, operator.lt, operator.le,
              operator.gt, operator.ge)
VERSION = "version of what a number is read off"


def _is_caught(tx: Any, instruction: Any) -> bool:
    """Whether what `instruction` raises comes to a handler of its own function, other than of a `with`."""
    while entry := instruction.exn_tab_entry:
        place = tx.indexof[entry.target]
        handler = [each.opname for each in tx.instructions[place:place + 3]]
        if not any(handler[:len(form)] == form for form in WITH):
            return True
        instruction = tx.instructions[place + 1]
    return False


def _can_only_raise(tx: Any, start: Any) -> bool:
    """Whether every way on from `start` ends in a raise that nothing in the function catches, or ends the process."""
    seen: set[int] = set()
    ways = [tx.indexof[start]]
    while ways:
        place = ways.pop()
        while place not in seen:
            seen.add(place)
            here = tx.instructions[place]
            if here.opname.startswith(("RETURN", "YIELD", "RERAISE")):
                return False
            if here.opname == "RAISE_VARARGS" or _ends_the_process(tx, place):
                if _is_caught(tx, here):
                    return False
                break
            if here.target is not None and here.opname.startswith(("POP_JUMP", "JUMP_IF", "FOR_ITER", "SEND")):
                ways.append(tx.indexof[here.target])
            jumps = here.target is not None and here.opname.startswith("JUMP_") and "IF" not in here.opname
            place = tx.indexof[here.target] if jumps else place + 1
    return True


def _ends_the_process(tx: Any, place: int) -> bool:
    """Whether ``sys.exit`` or its like is about to be called."""
    here, following = tx.instructions[place], tx.instructions[place + 1]
    if here.opname != "LOAD_GLOBAL":
        return False
    if here.argval in ("exit", "quit"):
        return here.argval not in tx.f_globals
    module, names = ENDS.get(here.argval, (None, ()))
    return module is not None and tx.f_globals.get(here.argval) is module and following.argval in names


def _side(tx: Any, jump: Any) -> bool | None:
    """The truth for which the branch at `jump` goes on, if for the other it can only raise, and to the caller of the step."""
    if not jump.opname.startswith(JUMPS) or "NONE" in jump.opname:
        return None
    on_jump = jump.opname.endswith("TRUE")
    behind = tx.instructions[tx.indexof[jump] + 1]
    raises = [_can_only_raise(tx, side) for side in (jump.target, behind)]
    if raises[0] == raises[1]:
        return None
    outer = tx.parent
    while outer:
        if _is_caught(outer, outer.current_instruction):
            return None
        outer = outer.parent
    return on_jump != raises[0]


def _of_data(node: Any) -> bool:
    """Whether a number is computed from one that is read off a tensor."""
    stack, seen = [node] if isinstance(node, fx.Node) else [], set()
    while stack:
        node = stack.pop()
        if node.op == "call_method" and node.target == "item" and not decided.is_given(node.args[0]):
            return True
        new = set(node.all_input_nodes) - seen if node.op == "call_function" else set()
        seen |= new
        stack += new
    return False


def is_of_data(variable: Any) -> bool:
    variable = variable.realize()
    return isinstance(variable, SymNodeVariable) and _of_data(variable.as_proxy().node)


def _tensor(tx: Any, value: Any) -> Any:
    """A number that is read off tensors, or is computed from such numbers, as a tensor: in float64, as Python computes.
    None if that cannot be said."""
    if not isinstance(value, fx.Node):
        return ConstantVariable.create(value) if isinstance(value, int | float) else None
    if value.op == "call_method" and value.target == "item":
        read = value.args[0]
        if not decided.is_given(read) and value.meta.get(VERSION) != read.meta["example_value"]._version:
            return None  # it has been written to since
        made = wrap_fx_proxy(tx, tx.output.create_proxy(
            "call_method", "detach", (fx.Proxy(read, tx.output.current_tracer),), {}))
        return made.call_method(tx, "double", [], {}) if fake_value(made).is_floating_point() else made
    operands = [_tensor(tx, each) for each in value.args] if value.target in ARITHMETIC else [None]
    return None if None in operands else VariableTracker.build(tx, value.target).call_function(tx, operands, {})


def _is_check(tx: Any) -> bool:
    """Whether what is computed now decides, and for nothing else, whether the step raises."""
    place = tx.instruction_pointer
    while tx.instructions[place].opname in ("TO_BOOL", "CACHE", "NOP"):
        place += 1
    return _allowed(tx) and _side(tx, tx.instructions[place]) is not None


def compared(original: Callable, compare: Callable, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """A comparison of numbers that are read off tensors; None if these are no such numbers.

    Dynamo takes them for finite: ``loss_value != loss_value`` would be false whatever the loss is. What it knows without
    the data ends the graph.
    """
    if not any(map(is_of_data, args)):
        return None
    if _is_check(tx):
        numbers = [_tensor(tx, each.realize().as_proxy().node if is_of_data(each) else each.realize().value if isinstance(
            each.realize(), ConstantVariable) else None) for each in args]
        if None not in numbers:
            return VariableTracker.build(tx, compare).call_function(tx, numbers, {})
    result = original(tx, args, kwargs)
    answer = getattr(result, "sym_num", None)
    if not isinstance(answer, torch.SymBool) or not answer.node.expr.free_symbols:
        break_graph("a number that is read off a tensor is compared with itself, or with infinity", "it may be neither finite "
                    "nor a number", "compare the tensor: torch.isfinite(loss)")
    return result


def asked(tx: Any, function: Callable, args: Sequence[Any]) -> Any:
    """``math.isfinite(loss.item())`` and the like in a check, as a tensor; None for anything else."""
    if function in ASKED and len(args) == 1 and is_of_data(args[0]) and _is_check(tx):
        number = _tensor(tx, args[0].realize().as_proxy().node)
        return number and VariableTracker.build(tx, ASKED[function]).call_function(tx, [number], {})
    return None


def item(tx: Any, tensor: Any) -> Any:
    """``torch.isnan(loss).item()`` in a check: the tensor itself. None for anything else."""
    return tensor if _is_tensor(tensor) and fake_value(tensor).dtype is torch.bool and _is_check(tx) else None


def note_version(tensor: Any, number: Any) -> None:
    """Note of ``tensor.item()`` what the tensor is at this place."""
    node = getattr(number, "as_proxy", lambda: None)() if isinstance(number, SymNodeVariable) else None
    if isinstance(getattr(node, "node", None), fx.Node):
        node.node.meta[VERSION] = fake_value(tensor)._version


def _is_tensor(variable: Any) -> bool:
    return isinstance(variable, TensorVariable) and not isinstance(variable, NumpyNdarrayVariable)


def _jump(original: Callable, self: Any, instruction: Any) -> None:
    value = self.stack[-1]  # what is not realized yet is no result
    tensor = value if _is_tensor(value) and decided.formula(value) is None else None
    if tensor and (known := constants.truth(tensor)) is not None:
        self.stack[-1] = ConstantVariable.create(known)
        return original(self, instruction)
    if tensor is None and isinstance(value, SymNodeVariable) and is_of_data(value) or tensor and fake_value(tensor).numel() == 1:
        side = _side(self, instruction) if _allowed(self) else None
        tensor = None if side is None else tensor or _tensor(self, value.as_proxy().node)
    else:
        tensor = None
    if tensor is None:
        return original(self, instruction)
    self.pop()
    place = f"{self.f_code.co_filename.rsplit('/', 1)[-1]}:{self.lineno}"
    with traced_without_grad(self):
        holds = tensor.call_method(self, "detach", [], {}).call_method(self, "bool", [], {})
        if not side:
            holds = holds.call_method(self, "logical_not", [], {})
        VariableTracker.build(self, torch.ops.memopt.require.default).call_function(
            self, [holds, ConstantVariable.create(place)], {})
    _checked(self)
    if side == instruction.opname.endswith("TRUE"):
        self.jump(instruction)
    return None


@contextlib.contextmanager
def patches(allowed: Callable[[Any], bool], checked: Callable[[Any], None]) -> Iterator[None]:
    """In force while a frame is traced. `allowed` says whether the graph may check data, `checked` is told of each check."""
    global _allowed, _checked
    outer, (_allowed, _checked) = (_allowed, _checked), (allowed, checked)
    tables = [cls.dispatch_table for cls in TRANSLATORS]
    before = [list(table) for table in tables]
    for table in tables:
        for name, opcode in dis.opmap.items():
            if name.startswith(JUMPS) and name.endswith(("TRUE", "FALSE")):
                table[opcode] = functools.partial(_jump, table[opcode])
    try:
        yield
    finally:
        _allowed, _checked = outer
        for table, old in zip(tables, before):
            table[:] = old


def _allowed(tx: Any) -> bool:
    return False


def _checked(tx: Any) -> None:
    """Nobody wants to know."""
