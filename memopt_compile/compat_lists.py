"""Lists of the user's that a step only adds to (``losses.append(loss.item())``).

Dynamo takes a list for all of its items, and guards how many they are: such a step would be traced again at every
call. Here a list is unread at first, and knows what is added. Whoever asks for its items makes it Dynamo's own, with
its guards. One that is still unread at the end is extended by what it got.

A deque is the same. What else Dynamo does with one that has a `maxlen` is put right too: it forgets the `maxlen`, and
then ``sum(window)`` counts items that are there no more. Checked against torch 2.11 and 2.13.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any
from unittest import mock

from torch._dynamo.bytecode_transformation import create_call_method, create_instruction
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lists import DequeVariable, ListVariable


class _Unread:
    """Stands before Dynamo's class of a list, until somebody asks for `items`."""

    def __init__(self, look: Callable[[], list[Any]], **kwargs: Any) -> None:
        VariableTracker.__init__(self, **kwargs)
        self.look, self.added = look, []

    @property
    def items(self) -> list[Any]:
        items = [*self.look(), *self.added]
        del self.look, self.added
        self.__class__ = WHOLE[type(self)]
        self.items = items
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

    def clone(self, **kwargs: Any) -> Any:
        assert self.items is not None  # a whole list from here on
        return self.clone(**kwargs)


def is_unread(variable: Any) -> bool:
    return isinstance(variable.realize(), _Unread)


class UnreadList(_Unread, ListVariable):
    pass


class UnreadDeque(_Unread, DequeVariable):
    pass


UNREAD = {list: UnreadList, collections.deque: UnreadDeque}
WHOLE = {UnreadList: ListVariable, UnreadDeque: DequeVariable}


def wrap(original: Callable, builder: Any, value: Any) -> Any:
    """`VariableBuilder.wrap_listlike`, that looks into a list when it has to."""
    if type(value) not in UNREAD:
        return original(builder, value)
    effects = builder.tx.output.side_effects

    def look() -> list[Any]:
        with mock.patch.object(effects, "track_mutable", lambda value, variable: variable):  # it is known by then
            return list(original(builder, value).items)

    builder.install_guards(GuardBuilder.TYPE_MATCH)
    variable = UNREAD[type(value)](look, source=builder.source)
    if isinstance(value, collections.deque):
        install_guard(AttrSource(builder.get_source(), "maxlen").make_guard(GuardBuilder.CONSTANT_MATCH))
        variable.maxlen = ConstantVariable.create(value.maxlen)
    return effects.track_mutable(value, variable)


def write_back(original: Callable, effects: Any, codegen: Any, *args: Any, **kwargs: Any) -> Any:
    """`SideEffects.codegen_update_mutated`, that extends what is unread, and gives a deque what fits in it."""
    changed = list(effects._get_modified_vars())
    for variable in changed:
        if isinstance(variable, _Unread):
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
            return original(effects, codegen, *args, **kwargs)
    finally:
        for variable, length in zip(bounded, lengths, strict=True):
            variable.maxlen = length
