"""Lists of the user's that a step only adds to (``losses.append(loss.item())``), and dicts (``losses[step] = ...``).

Dynamo takes a list for all of its items, and guards how many they are: such a step would be traced again at every
call. Here a list is unread at first, and knows what is added. Whoever asks for its items makes it Dynamo's own, with
its guards; its length and its last items are known without (`compat.items`). One that is still unread at the end is
extended by what it got. A dict is the same, and its keys may be numbers and texts that change.

A deque is as a list. What else Dynamo does with one that has a `maxlen` is put right too: it forgets the `maxlen`, and
then ``sum(window)`` counts items that are there no more. Checked against torch 2.11 and 2.13.
"""

from __future__ import annotations

import collections
import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch._dynamo.bytecode_transformation import create_call_method, create_instruction
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import DequeVariable, ListVariable
from torch._dynamo.variables.misc import StringFormatVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from . import items as compat_items
from . import schedulers


def behind_the_step(tx: Any) -> None:
    """Leave what follows to Python if the step is over: with all of a list that grows it would be traced again at each
    call. In force while a frame is traced is `read_later.end_behind`."""


class _Unread:
    """Stands before Dynamo's class of a list or dict, until somebody asks for `items`."""

    def __init__(self, real: Any, look: Callable[[], Any], **kwargs: Any) -> None:
        VariableTracker.__init__(self, **kwargs)
        self.real, self.look, self.added = real, look, []

    def _whole(self) -> tuple[Any, list]:
        """Dynamo's own class from here on; what `look` finds, and what was added."""
        found, added = self.look(), self.added
        del self.look, self.added, self.real
        self.__class__ = WHOLE[type(self)]
        return found, added

    def clone(self, **kwargs: Any) -> Any:
        assert self.items is not None  # whole from here on
        return self.clone(**kwargs)


class _UnreadSequence(_Unread):
    @property
    def items(self) -> list[Any]:
        if compat_items.grows(tx := InstructionTranslator.current_tx(), self):
            behind_the_step(tx)
        found, added = self._whole()
        items = self.items = [*found.items, *added]
        if isinstance(self, DequeVariable) and (most := self.maxlen.as_python_constant()) is not None:
            self.items = items[max(len(items) - most, 0):]
        return self.items

    def call_method(self, tx: Any, name: str, args: Any, kwargs: dict) -> Any:
        if name not in ("append", "extend") or len(args) != 1 or kwargs:
            return super().call_method(tx, name, args, kwargs)
        added = [args[0]]
        if name == "extend":
            fresh = ListVariable([], mutation_type=ValueMutationNew())
            fresh.call_method(tx, "extend", args, {})  # where that is the list itself, it is whole from here on
            added = fresh.items
        if not isinstance(self, _Unread):
            return self.call_method(tx, name, [fresh], {})
        tx.output.side_effects.mutation(self)
        self.added.extend(added)
        return ConstantVariable.create(None)


class UnreadList(_UnreadSequence, ListVariable):
    def getitem_const(self, tx: Any, arg: Any) -> Any:
        if (known := compat_items.item(tx, self, arg)) is not None:
            return known
        assert self.items is not None  # whole from here on
        return self.getitem_const(tx, arg)

    def sq_length(self, tx: Any) -> Any:
        return compat_items.length(tx, self)


class UnreadDeque(_UnreadSequence, DequeVariable):
    pass


def _of_the_whole(name: str) -> property:
    def read(self: Any) -> Any:
        found, added = self._whole()
        for each in ("user_cls", "items", "original_items", "should_reconstruct_all"):
            setattr(self, each, getattr(found, each))
        for key, value in added:
            self.call_method(InstructionTranslator.current_tx(), "__setitem__", [key, value], {})
        return getattr(self, name)

    def write(self: Any, value: Any) -> None:
        assert read(self) is not None  # whole from here on
        setattr(self, name, value)

    return property(read, write)


class UnreadDict(_Unread, ConstDictVariable):
    items, original_items, should_reconstruct_all = map(_of_the_whole, ("items", "original_items", "should_reconstruct_all"))

    user_cls = property(lambda self: dict)

    def call_method(self, tx: Any, name: str, args: Any, kwargs: dict) -> Any:
        key = args[0].realize() if name == "__setitem__" and len(args) == 2 else None
        if not isinstance(key, (ConstantVariable, SymNodeVariable, StringFormatVariable)):
            return super().call_method(tx, name, args, kwargs)
        tx.output.side_effects.mutation(self)
        self.added.append((key, args[1]))
        return ConstantVariable.create(None)


UNREAD = {list: UnreadList, collections.deque: UnreadDeque}
WHOLE = {UnreadList: ListVariable, UnreadDeque: DequeVariable, UnreadDict: ConstDictVariable}


def is_unread(variable: Any) -> bool:
    """Whether this is a list or deque that is still unread."""
    return isinstance(variable.realize(), _UnreadSequence)


def without_deques(function: Callable, args: Any) -> Any:
    """The arguments of ``torch.tensor(returns)``, with a list for a deque, of which Dynamo knows no graph's argument."""
    if function not in (torch.tensor, torch.as_tensor) or not args or not isinstance(given := args[0].realize(), DequeVariable):
        return args
    return [ListVariable(list(given.items), mutation_type=ValueMutationNew()), *args[1:]]


def read(tx: Any, function: Callable, args: Any) -> Any:
    """``len(losses)`` of an unread list, ``rates[step]`` of an array; None for anything else."""
    if function is len and len(args) == 1 and isinstance(unread := args[0].realize(), UnreadList):
        return compat_items.length(tx, unread)
    return compat_items.item_of_array(tx, *args) if function is operator.getitem and len(args) == 2 else None


def _looked_at(original: Callable, builder: Any, value: Any) -> Any:
    # Known by then to the effects, which are others where something has been traced apart (a hook, a checkpoint).
    with mock.patch.object(builder.tx.output.side_effects, "track_mutable", lambda value, variable: variable):
        return original(builder, value)


def wrap_any(original: Callable, builder: Any, value: Any) -> Any:
    """`VariableBuilder._wrap`, that does the same with a dict whose keys are constants."""
    if type(value) is not dict or not all(map(ConstantVariable.is_literal, value)):
        return original(builder, value)

    def look() -> Any:
        return _looked_at(original, builder, value)

    builder.install_guards(GuardBuilder.TYPE_MATCH)
    return builder.tx.output.side_effects.track_mutable(value, UnreadDict(value, look, source=builder.source))


def _wrap_list(original: Callable, builder: Any, value: Any) -> Any:
    """`VariableBuilder.wrap_listlike`, that looks into a list when it has to."""
    def look() -> Any:
        return _looked_at(original, builder, value)

    builder.install_guards(GuardBuilder.TYPE_MATCH)
    variable = UNREAD[type(value)](value, look, source=builder.source)
    if isinstance(value, collections.deque):
        install_guard(AttrSource(builder.get_source(), "maxlen").make_guard(GuardBuilder.CONSTANT_MATCH))
        variable.maxlen = ConstantVariable.create(value.maxlen)
    return builder.tx.output.side_effects.track_mutable(value, variable)


def _write_back(original: Callable, effects: Any, codegen: Any, *args: Any, **kwargs: Any) -> Any:
    """`SideEffects.codegen_update_mutated`, that extends what is unread, and gives a deque what fits in it."""
    changed = list(effects._get_modified_vars())
    for variable in changed:
        if isinstance(variable, UnreadDict):
            for key, value in variable.added:
                for each in (value, variable.source, key):
                    codegen(each)
                codegen.append_output(create_instruction("STORE_SUBSCR"))
        elif isinstance(variable, _Unread):
            codegen(variable.source)
            codegen.load_method("extend")
            codegen.foreach(variable.added)
            codegen.extend_output([create_instruction("BUILD_LIST", arg=len(variable.added)), *create_call_method(1),
                                   create_instruction("POP_TOP")])
    others = [variable for variable in changed if not isinstance(variable, _Unread)]
    bounded = [v for v in others if isinstance(v, DequeVariable) and not v.maxlen.is_constant_none()]
    lengths = [v.maxlen for v in bounded]
    for variable in bounded:
        variable.maxlen = ConstantVariable.create(None)  # Dynamo refuses any other; the items fit as they are
    try:
        with mock.patch.object(effects, "_get_modified_vars", lambda: others):
            original(effects, codegen, *args, **kwargs)
            schedulers.call_them(codegen)
    finally:
        for variable, length in zip(bounded, lengths, strict=True):
            variable.maxlen = length


def table_of_types() -> dict[type, Callable]:
    """How `VariableBuilder` makes a variable of a value, by its type. Dynamo keeps its own for the whole process."""
    known = VariableBuilder._type_dispatch()
    lists = {kind: functools.partial(_wrap_list, known[kind]) for kind in UNREAD}
    counts = {itertools.count: compat_items.wrap_count} if itertools.count in known else {}  # 2.13
    return {**known, **lists, **counts}


REPLACED = [(SideEffects, "codegen_update_mutated", _write_back)]
