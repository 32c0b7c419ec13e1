"""One item or the length of a list of the user's, read without the list.

Dynamo takes a list for all of its items and guards how many there are, and makes a constant of an index. So a list that
grows (``losses[-1] - losses[-2]``) or a schedule (``rates[step]``) would be traced again at each call. Here what is read
is an input of its own. Checked against torch 2.11 and 2.13.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.guards import GuardBuilder, _get_closure_vars
from torch._dynamo.source import is_constant_source
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.iter import CountIteratorVariable
from torch._dynamo.variables.tensor import NumpyNdarrayVariable, SymNodeVariable
from torch._guards import ChainedSource, Source, dataclass_with_cached_hash

from . import changes, real_value, source_name


def item_of(sequence: Any, index: int) -> Any:
    return sequence[index]


def number_of(array: Any, index: int) -> float:
    return float(array[index])


def next_of(count: Any) -> Any:
    return count.__reduce__()[1][0]


def step_of(count: Any) -> Any:
    return (count.__reduce__()[1] + (1,))[1]


for _function in (item_of, number_of, next_of, step_of):
    skip_code(_function.__code__)  # called by what Dynamo has compiled, and not to be compiled


@dataclass_with_cached_hash(frozen=True)
class ReadSource(ChainedSource):
    """``read(base, index)``, or ``read(base)``. The index is a number, or where the step finds one."""

    read: Callable[..., Any]
    index: Any = None

    def reconstruct(self, codegen: Any) -> None:
        codegen.add_push_null(lambda: codegen.load_import_from(self.read.__module__, self.read.__name__))
        codegen(self.base)
        if isinstance(self.index, Source):
            codegen(self.index)
        elif self.index is not None:
            codegen.append_output(codegen.create_load_const(self.index))
        codegen.extend_output(create_call_function(1 if self.index is None else 2, False))

    @functools.cached_property
    def _name_template(self) -> str:
        index = source_name(self.index) if isinstance(self.index, Source) else repr(self.index)
        index = index.replace("{", "{{").replace("}", "}}")
        return {len: "len({0})", item_of: f"{{0}}[{index}]", number_of: f"float({{0}}[{index}])",
                next_of: "{0}.__reduce__()[1][0]", step_of: "({0}.__reduce__()[1] + (1,))[1]"}[self.read]


def _manager(original: Callable, builder: Any, source: Any) -> Any:
    """`GuardBuilder.get_guard_manager_from_source`, of a `ReadSource` too."""
    if not isinstance(source, ReadSource):
        return original(builder, source)
    known = builder._cached_guard_managers
    if source.name not in known:
        if isinstance(source.index, Source):
            base, names = builder.guard_manager.root, builder.scope["G"]

            def read(frame: Any) -> Any:
                return source.get_value({"L": frame, "G": names}, dict(_get_closure_vars()), {})
        else:
            base = original(builder, source.base)

            def read(sequence: Any) -> Any:
                return source.read(sequence, *([] if source.index is None else [source.index]))

        known[source.name] = base.lambda_manager(
            python_lambda=read, source=source.name, example_value=builder.get(source),
            guard_manager_enum=builder.get_guard_manager_type(source, None))
    return known[source.name]


def _read(tx: Any, base: Any, read: Callable, value: Any, index: Any = None) -> Any:
    builder = VariableBuilder(tx, ReadSource(base, read, index))
    if isinstance(value, float) and (isinstance(index, Source) or index is not None and index < 0):
        changes(builder, value + 1.0)  # it will be another one in the next call: no constant at first
    return builder(value)


def length(tx: Any, unread: Any) -> Any:
    """How long an unread list is at this place of the step."""
    known = _read(tx, unread.source, len, len(unread.real))
    return VariableTracker.build(tx, operator.add).call_function(tx, [known, ConstantVariable.create(len(unread.added))], {})


def grows(tx: Any, unread: Any) -> bool:
    """Whether an unread list gets longer from call to call, as a full deque does not."""
    if getattr(unread.real, "maxlen", None) == len(unread.real):
        return False
    builder = VariableBuilder(tx, ReadSource(unread.source, len))
    return changes(builder, float(len(unread.real))) or len(unread.added) > 0


def item(tx: Any, unread: Any, index: Any) -> Any:
    """A float at the end of an unread list, or at a place that changes; None for what the list is needed for."""
    index = index.realize()
    added, real = unread.added, unread.real
    if isinstance(index, ConstantVariable) and type(index.value) is int and index.value < 0:
        if -index.value <= len(added):
            return added[index.value]
        place = known = index.value + len(added)
    elif _is_found(index) and not added:
        place, known = index.source, int(index.sym_num.node.hint)
    else:
        return None
    if not -len(real) <= known < len(real) or type(real[known]) is not float:
        return None
    return _read(tx, unread.source, item_of, real[known], place)


def item_of_array(tx: Any, array: Any, index: Any) -> Any:
    """``rates[step]`` of a NumPy array, as a number; None for anything else."""
    array, index = array.realize(), index.realize()
    if not isinstance(array, NumpyNdarrayVariable) or not array.source or is_constant_source(array.source):
        return None
    constant = isinstance(index, ConstantVariable) and type(index.value) is int
    real = real_value(tx, array) if constant or _is_found(index) else None
    if real is None or real.dtype is not torch.float64 or real.dim() != 1:
        return None
    known = index.value if constant else int(index.sym_num.node.hint)
    if not -len(real) <= known < len(real):
        return None
    return _read(tx, array.source, number_of, real[known].item(), index.value if constant else index.source)


def wrap_count(builder: Any, count: Any) -> Any:
    """An `itertools.count` of the user's, at a number that changes. Dynamo guards which it is."""
    builder.install_guards(GuardBuilder.TYPE_MATCH)
    item, step = (_read(builder.tx, builder.source, read, read(count)) for read in (next_of, step_of))
    return builder.tx.output.side_effects.track_mutable(count, CountIteratorVariable(item, step, source=builder.source))


def _is_found(index: Any) -> bool:
    """Whether this is a whole number that changes and is the step's own, not computed by it."""
    return isinstance(index, SymNodeVariable) and isinstance(index.sym_num, torch.SymInt) and index.source is not None


REPLACED = [(GuardBuilder, "get_guard_manager_from_source", _manager)]
