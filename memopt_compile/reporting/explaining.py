"""`memopt.explain`: compile a step for its report, and run nothing of it."""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import fx

from .. import compat
from ..compat import trace
from ..errors import CaptureError, MemoptError, OptionError
from ..options import FOR_A_BUDGET, Options
from ..records import Compilation, code_of, planning
from .frontier import Frontier, frontier
from .render import Report

_numbers = itertools.count()


class _Planned(BaseException):
    """Ends the call of a step once it is planned. No `Exception`, so that Dynamo lets it by."""


def explain(step: Callable[..., Any], *args: Any, **options: Any) -> Report | Frontier:
    """The report that compiling `step` with `options` and calling it on `args` would give.

    Nothing of the step runs: parameters, gradients, optimizer state and random numbers stay as
    they are, and so does what `torch.compile` knows of `step`. If tracing stops early (a graph
    break), the report is of the graph up to there.

    Args:
        step: a function, method or module; if compiled, the function behind it is planned.
        args: what the step would be called with.
        options: the fields of `Options`. `memory_budget` may be a list: then the result is the
            `Frontier` of the step's peak against its time, with a plan for each.

    Raises:
        OptionError: an option is wrong, or `step` is no Python function.
        InfeasibleBudget: no plan fits `memory_budget`.
        CaptureError: no graph could be traced from the start of `step`.
    """
    budgets = options.get("memory_budget")
    if not isinstance(budgets, list | tuple):
        return Report.of(planned(step, args, options))
    budgets = [budget for budget in budgets if budget is not None]
    if not budgets:
        raise OptionError("there is no budget to plan for", where="memory_budget=[..]", do="give some, such as [0.8, 0.5]")
    if options.get("dump"):
        raise OptionError("there is no one plan to write", where="dump, memory_budget=[..]", do="give one budget, or leave dump out")
    for budget in budgets:
        Options.from_dict({**options, "memory_budget": budget})
    one = budgets[0] if any(map(options.get, FOR_A_BUDGET)) else None
    record = planned(step, args, {**options, "memory_budget": one}, captured_only=True)
    if record.captured is None:
        raise CaptureError(f"there is no whole step to plan: {record.reason or 'no backward() in it'}",
                           where=record.where, do="see memopt.explain with one budget or none")
    return frontier(record, budgets)


def planned(step: Callable[..., Any], args: Sequence[Any], options: dict[str, Any],
              captured_only: bool = False) -> Compilation:
    """The record of compiling `step` for `args`, without running anything of it."""
    Options.from_dict(options)  # what is wrong with them is wrong before anything is traced
    plan = _Plan(options)
    compiled = torch.compile(_copy(step), backend=plan)
    if not hasattr(compiled, "_torchdynamo_orig_callable"):
        raise CaptureError("torch.compile is switched off in this process", where="explain",
                           do="unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE")
    signal, failure = _Planned(), None
    with (planning(captured_only) as records, _optimizers_restored(), torch.compiler.set_stance("default"),
          trace.real_tensors(),  # torch traces with fake ones of its own, inside `planned_ranks` too
          trace.raising_after_first_frame(signal)):
        try:
            compiled(*args)
        except _Planned as stopped:
            failure = stopped.__cause__
    failure = plan.refusal or failure
    if failure is not None:
        raise failure
    if not records:
        code = code_of(step)
        raise CaptureError("nothing could be traced from the start of the step",
                           where=f"{code.co_qualname} at line {code.co_firstlineno}",
                           do="move what comes before the forward out of the step; "
                           'TORCH_LOGS="graph_breaks" shows where tracing stops')
    return records[-1]


class _Plan:
    """The backend of `explain`: memopt's own, with its refusals kept for the caller."""

    def __init__(self, options: dict[str, Any]):
        self.options = options
        self.refusal: MemoptError | None = None
        # As `compat.frames.backend_of` looks.
        self.compiler_fn = trace.backend_named("memopt")
        self.kwargs = {"options": options}

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        compiled = self.compiler_fn(gm, inputs, options=self.options)
        # A refusal comes as a function that raises the error it holds when it is called.
        if inspect.isfunction(compiled):
            held = inspect.getclosurevars(compiled).nonlocals.get("error")
            self.refusal = held if isinstance(held, MemoptError) else None
        return compiled


def _copy(step: Callable[..., Any]) -> Callable[..., Any]:
    """The user's function with code of its own, which Dynamo has never seen.

    Dynamo keeps programs by code object, and what it has learnt of sizes by file, line and name:
    hence a name of its own, or planning for one batch would make the next batch dynamic.
    """
    code_of(step)  # or there is none
    bound = step.forward if isinstance(step, torch.nn.Module) else step
    original = compat.with_optimized_original(step)
    owner = getattr(getattr(bound, "_torchdynamo_orig_callable", bound), "__self__", None)
    code = original.__code__
    name = f"{code.co_name}_planned_{next(_numbers)}"
    copy = FunctionType(code.replace(co_name=name), original.__globals__, name,
                        original.__defaults__, original.__closure__)
    copy.__kwdefaults__ = original.__kwdefaults__
    copy.__dict__.update(original.__dict__)
    copy.__module__, copy.__qualname__ = original.__module__, original.__qualname__
    return copy if owner is None else MethodType(copy, owner)


@contextlib.contextmanager
def _optimizers_restored() -> Iterator[None]:
    """Take away again the optimizer state that capture makes before it traces the update."""
    optimizers = [each for each in gc.get_objects()
                  if issubclass(type(each), torch.optim.Optimizer)]
    before = [({p: dict(state) for p, state in each.state.items()}, vars(each).get("_opt_called"))
              for each in optimizers]
    try:
        yield
    finally:
        for optimizer, (states, called) in zip(optimizers, before, strict=True):
            for parameter in list(optimizer.state):
                if parameter not in states:
                    del optimizer.state[parameter]
            for parameter, state in states.items():
                optimizer.state[parameter].clear()
                optimizer.state[parameter].update(state)
            if called is None:
                vars(optimizer).pop("_opt_called", None)
