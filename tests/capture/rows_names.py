"""What a step writes by one name and reads by another."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from loops import Loop, adamw, both_and, loop, mlp, ordinary, row
from torch import nn
from torch.torch_version import TorchVersion

# An older Dynamo traces nothing that writes to a class.
class_row = row if TorchVersion(torch.__version__) >= "2.13" else ordinary


class OneState:
    """All of this class are one, as Accelerate's states are."""

    shared: dict = {}

    def __init__(self) -> None:
        self.__dict__ = self.shared


class OtherState(OneState):
    pass


class Wrapped:
    """An optimizer that steps where gradients are complete, with a state of its own that is the loop's, too."""

    def __init__(self, opt, kind=OneState) -> None:
        self.opt, self.state = opt, kind()

    def step(self) -> None:
        if self.state.complete:
            self.opt.step()

    def zero_grad(self) -> None:
        if self.state.complete and "set_to_none" in inspect.signature(self.opt.zero_grad).parameters:
            self.opt.zero_grad(set_to_none=False)


def of_one_state(kind=OneState, state=None) -> Loop:
    model = mlp()
    OneState.shared.clear()
    of_loop, opt = OneState(), Wrapped(adamw(model), kind)
    of_loop.calls, of_loop.complete = 0, False

    def step(x, y):
        now = state() if state else of_loop
        now.complete = not now.complete
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return loop(model, opt.opt, step, wrap=both_and(lambda: of_loop.complete))


@row
def gradients_accumulated_by_a_state_of_two_objects() -> Loop:
    return of_one_state()


@row
def state_of_all_made_in_the_step() -> Loop:
    return of_one_state(state=OneState)


@ordinary
def state_of_two_classes() -> Loop:
    return of_one_state(OtherState)


def state_that_making_one_changes() -> Loop:
    """Python makes it, ahead of the forward."""
    class Counted(OneState):
        def __init__(self) -> None:
            super().__init__()
            self.calls += 1

    return of_one_state(state=Counted)


def every_second_time(put: Callable, get: Callable) -> Loop:
    """A step that updates where `get` gives what the step has `put`, which is another answer at each call."""
    model = mlp()
    opt = adamw(model)
    put(False)

    def step(x, y):
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        put(not get())
        if get():
            opt.step()
            opt.zero_grad()
        return loss.detach()

    return loop(model, opt, step, wrap=both_and(get))


class Settings:
    update = False

    @classmethod
    def put(cls, value: bool) -> None:
        cls.update = value


class Derived(Settings):
    pass


@class_row
def attribute_of_a_class_read_by_its_object() -> Loop:
    """And a class that is derived from it."""
    settings = Settings()
    return every_second_time(Settings.put, lambda: settings.update and Derived.update)


@class_row
def attribute_of_a_modules_class() -> Loop:
    class Counting(nn.Module):
        calls = 0

    module = Counting()

    def put(value):
        Counting.calls = Counting.calls + 1 if Counting.calls % 2 != value else Counting.calls

    return every_second_time(put, lambda: bool(module.calls % 2))


@class_row
def attribute_of_an_object_over_its_classs() -> Loop:
    settings = Settings()

    def put(value):
        Settings.update, settings.update = not value, value

    return every_second_time(put, lambda: settings.update)


@row
def property_that_sets_another_attribute() -> Loop:
    class Guarded:
        @property
        def update(self) -> bool:
            return self.kept

        @update.setter
        def update(self, value: bool) -> None:
            self.kept = value

    guarded = Guarded()

    def put(value):
        guarded.update = value

    return every_second_time(put, lambda: guarded.kept)


update = False


@row
def global_read_as_an_attribute_of_its_module() -> Loop:
    here = sys.modules[__name__]

    def put(value):
        global update
        update = value

    return every_second_time(put, lambda: here.update)


@row
def class_changed_between_calls() -> Loop:
    """By the loop around the step."""
    model = mlp()
    opt = adamw(model)
    Settings.update = True

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if Settings.update:
            opt.step()
            opt.zero_grad()
        return loss.detach()

    return loop(model, opt, step, after=lambda i: Settings.put(i % 2 == 1))


def scaled_behind(apart: Callable) -> Loop:
    """What is written to an object behind a function that Dynamo traces apart."""
    model, state = mlp(), Settings()
    opt = adamw(model)

    def step(x, y):
        state.scale = 1.0
        hidden = apart(model[0](x))
        state.scale = 3.0
        loss = F.cross_entropy(model[1:](hidden), y) * state.scale
        loss.backward()
        state.seen = state.scale
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return loop(model, opt, step, wrap=both_and(lambda: [state.scale, state.seen]))


@row
def attribute_written_behind_a_hook() -> Loop:
    def apart(hidden):
        hidden.register_hook(lambda g: g * 2)
        return hidden

    return scaled_behind(apart)


@row
def attribute_written_behind_a_branch() -> Loop:
    return scaled_behind(lambda hidden: torch.cond(hidden.sum() > 0, lambda h: h * 2, lambda h: h * 3, (hidden,)))
