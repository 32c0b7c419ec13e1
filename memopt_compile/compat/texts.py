"""Texts with numbers in them that Dynamo follows as symbols (``f"{rate:.3f}"``): made when the step has run.

Where the trace itself has to know such a text, as the key of a dict or an item of a set, its numbers become constants.
Dynamo would take two equal texts for two keys, without a word. Checked against torch 2.11 and 2.13.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch._dynamo.bytecode_transformation import create_call_method
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.utils import specialize_symnode
from torch._dynamo.variables import dicts
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.misc import StringFormatVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

from . import breaks

READERS = (len, int, float, ord, operator.contains, operator.eq, operator.ne)  # functions that ask for letters of a text


def text_of(number: Any, form: Any, conversion: str = "") -> Any:
    return StringFormatVariable.create(f"{{{conversion}:{form.as_python_constant()}}}", [number], {})


class _PercentVariable(StringFormatVariable):
    """``"%.3f" % rate``, the same of the older kind."""

    def reconstruct(self, codegen: Any) -> None:
        codegen.append_output(codegen.create_load_const(self.format_string))
        codegen.load_method("__mod__")
        codegen(self.sym_args[0])
        codegen.extend_output(create_call_method(1))


def percent_of(form: Any, given: Any) -> Any:
    """``form % given`` with a number in it that Dynamo follows as a symbol; None for anything else."""
    if not (form.is_python_constant() and isinstance(form.as_python_constant(), str)):
        return None
    given = given.realize()
    parts = [part.realize() for part in _parts(given)]
    if not any(isinstance(part, SymNodeVariable) for part in parts) or any(isinstance(part, TensorVariable) for part in parts):
        return None
    return _PercentVariable(form.as_python_constant(), [given], {})


def _parts(given: Any) -> list[Any]:
    if isinstance(given, TupleVariable):
        return given.items
    return list(given.items.values()) if isinstance(given, ConstDictVariable) else [given]


def read_by(function: Callable, args: Any) -> list[Any]:
    """The arguments of a function that may ask for the letters of a text among them."""
    return _settled_texts(args) if function in READERS else args


def comparing(original: Callable, tx: Any, args: Any, kwargs: Any) -> Any:
    """``text == "best"`` and the like. (In torch 2.11 no text with a number in it equals another.)"""
    return original(tx, _settled_texts(args), kwargs)


def _settled_texts(args: Any) -> list[Any]:
    return [settled(each) if _is_text(each) else each for each in args]


def _is_text(value: Any) -> bool:
    return issubclass(type(value), StringFormatVariable)  # `isinstance` makes a lazy variable known


def settled(value: Any) -> Any:
    """A text or number as the constant that it is in this call, which the step is guarded on."""
    if not _is_text(value):
        return specialize_symnode(value)
    percent = isinstance(value, _PercentVariable)
    if percent and isinstance(value.sym_args[0], TupleVariable):
        given: Any = tuple(map(_constant, value.sym_args[0].items))
    elif percent and isinstance(value.sym_args[0], ConstDictVariable):
        given = {key.vt.as_python_constant(): _constant(each) for key, each in value.sym_args[0].items.items()}
    elif percent:
        given = _constant(value.sym_args[0])
    else:
        return ConstantVariable.create(value.format_string.format(
            *map(_constant, value.sym_args), **{key: _constant(each) for key, each in value.sym_kwargs.items()}))
    return ConstantVariable.create(value.format_string % given)


def _constant(part: Any) -> Any:
    part = settled(part)
    if not part.is_python_constant():
        breaks.break_graph("a text is asked for that the step has yet to compute", "the trace needs it to go on",
                           "use the text behind the step only, or look it up there")
    return part.as_python_constant()


def _format_value(original: Callable, translator: Any, form: Any, flags: int) -> None:
    """An f-string's number. Dynamo has its value there, or a constant, in place of a text."""
    if not isinstance(value := translator.stack[-1].realize(), SymNodeVariable):
        return original(translator, form, flags)
    translator.pop()
    translator.push(text_of(value, form, ("", "!s", "!r", "!a")[flags & 3]))


def _contains_guard(original: Callable, self: Any, tx: Any, args: Any) -> None:
    """Also of a key that is no constant yet, of which Dynamo guards nothing."""
    return original(self, tx, [settled(each) for each in args])


def _absent(original: Callable, self: Any, tx: Any, key: Any) -> Any:
    """``d[key]`` of a key that is not there (``except KeyError``), of which Dynamo guards nothing either."""
    if key not in self:
        self.install_dict_contains_guard(tx, [key])
    return original(self, tx, key)


KEY = getattr(ConstDictVariable, "_HashableTracker", None) or dicts.HashableTracker  # 2.11, 2.13
REPLACED = [(InstructionTranslatorBase, "_format_value", _format_value),
            (KEY, "__init__", lambda original, self, value: original(self, settled(value))),
            (ConstDictVariable, "__contains__", lambda original, self, key: original(self, settled(key))),  # 2.11: or no key
            (ConstDictVariable, "getitem_const_raise_exception_if_absent", _absent),
            (ConstDictVariable, "install_dict_contains_guard", _contains_guard)]
if hasattr(dicts.SetVariable, "install_set_contains_guard"):  # 2.13
    REPLACED.append((dicts.SetVariable, "install_set_contains_guard", _contains_guard))
