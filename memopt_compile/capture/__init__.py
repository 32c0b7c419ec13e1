"""Capture of a whole training step: what Dynamo does while it traces for memopt.

`torch.compile` traces ordinary Python; a training step stops it at four places, and each has
a stand-in here that is in force only while a frame is traced for this backend:

1. ``loss.backward()`` differentiates the leaves that the loss really reaches. (Dynamo's own
   search can miss leaves that the step met through the optimizer first, and then trains
   nothing without a word.)
2. ``opt.step()`` and ``opt.zero_grad()`` are traced as the plain Python they are, one tensor
   at a time, with optimizer state made beforehand.
3. Tensors whose autograd graph the step has used up are returned detached.
4. A learning rate is a graph input at once, not after a first recompilation.

Two marker operators leave the trace legible: ``memopt::seed`` stands where a backward starts,
``memopt::gradient`` on each finished gradient of a leaf. `step_graph` reads and removes them.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import compat, folding
from ..compat import branches, breaks, decided, dynamo, frames, guards, used_up
from ..errors import MemoptError
from ..records import compilations
from . import backward, functions, iterations, read_later, telling, torch_optim, update_copies

log = logging.getLogger("memopt_compile")


@torch.library.custom_op("memopt::gradient", mutates_args=())
def gradient(value: Tensor) -> Tensor:
    """A copy of `value`. Marks it as the whole gradient of one leaf from one backward."""
    return value.clone()


gradient.register_fake(lambda value: torch.empty_like(value))


@dataclass
class Notes:
    """What was seen while one frame was traced, for the backend that gets its graph."""

    frame: Any = None  # code that is traced
    function: Any = None  # code of the user's function that it is, or is around
    step: Any = None
    trace: Any = None
    where: str = ""
    resumed: bool = False
    stepped: bool = False  # another frame was a whole step
    begun: bool = False  # its graph is differentiated outside
    to_come: bool = False  # its graph ends before the forward, and what follows is traced too
    again: bool = False  # its trace came to nothing, and another follows
    reason: str | None = None
    backwards: int = 0
    updates: int = 0
    replaced_gradients: dict[str, Any] = field(default_factory=dict)
    optimizers: list[Any] = field(default_factory=list)
    loops: list[iterations.Loop] = field(default_factory=list)
    unroll: bool = False
    reads: int = 0  # numbers read off tensors
    reads_behind: int = 0  # of these, behind the last update
    reads_later: bool = True
    reads_behind_later: bool = True
    checks: bool = True  # the graph may check data where a branch raises
    replaced_at_checks: list[frozenset[str]] = field(default_factory=list)  # whose gradients were, by then
    left: bool = False  # to Python: nothing of the frame is compiled
    folds: bool = False  # accumulate="optimizer_states"
    needs: str = ""  # an option that is refused where the step is not whole
    eager: bool = False  # lowering="eager"
    one_graph: bool = False  # fullgraph=True
    refusal: MemoptError | None = None

    @property
    def shortened(self) -> int:
        """How many loops over micro-batches are in the trace with three iterations only."""
        return sum(loop.shortened for loop in self.loops)

    def trace_again(self, why: object) -> NoReturn:
        """Have Dynamo trace the frame anew with every loop unrolled."""
        log.info("%s: loop over micro-batches traced whole: %s", self.where, why)
        self.unroll = True
        breaks.restart(self.trace, str(why))

    def read_at_once(self, why: object) -> NoReturn:
        """Have Dynamo trace the frame anew, and end its graph where a number is read off a tensor: first behind the step."""
        log.info("%s: numbers are read where they stand: %s", self.where, why)
        if self.reads_behind:
            self.reads_behind_later = False
        else:
            self.reads_later = False
        breaks.restart(self.trace, str(why))

    def branch_at_once(self) -> NoReturn:
        """Have Dynamo trace the frame anew, and end its graph where the data decide."""
        self.checks = False
        breaks.restart(breaks.traced_now(), "eager could not do the step where a check fails")

    def leave(self, why: str) -> NoReturn:
        """Have Dynamo leave the frame to Python."""
        self.left = True
        breaks.restart(self.trace, why)


_notes = Notes()


def notes() -> Notes:
    """The notes of the frame being traced now."""
    return _notes


def _notes_of(tx: Any) -> Notes:
    """The same, counting afresh each time that Dynamo begins the frame again."""
    if _notes.trace is not tx.output:
        _notes.trace, _notes.backwards, _notes.updates = tx.output, 0, 0
        _notes.optimizers, _notes.loops, _notes.reads, _notes.reads_behind = [], [], 0, 0
        _notes.replaced_at_checks, _notes.one_graph = [], breaks.demands_one_graph(tx.output)
    return _notes


# ---------------------------------------------------------------- Dynamo's methods, replaced


def _optimizer_getattr(original: Callable, self: Any, tx: Any, name: str) -> Any:
    optimizer = self.value
    if name in ("step", "zero_grad"):
        guards.guard_methods(self)
    if name == "zero_grad" and "zero_grad" not in vars(optimizer):
        if type(optimizer).zero_grad is torch.optim.Optimizer.zero_grad:
            return compat.UserMethodVariable(torch_optim.zero_grad, self)
    if name == "step":
        return _traced_step(self, tx)
    if name == "accumulate":  # folds gradients into the state before any step (AdamA)
        _noted(optimizer, tx)
    if name == "_init_group" and hasattr(optimizer, "_init_group"):
        return compat.UserMethodVariable(compat.undisabled(type(optimizer)._init_group), self)
    # Past OptimizerVariable, which would make `capturable` true and its parameters static.
    return super(compat.OptimizerVariable, self).var_getattr(tx, name)


def _traced_step(self: Any, tx: Any) -> Any:
    optimizer = self.value
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):  # never initialized, as of many a Lookahead: a plain method
        return compat.UserMethodVariable(type(optimizer).step, self)
    torch_optim.refuse(optimizer)
    notes = _noted(optimizer, tx)
    notes.refusal = notes.refusal or notes.folds and folding.refusal(optimizer) or None
    if hasattr(optimizer, "_opt_called") or "step" in vars(optimizer):
        optimizer._opt_called = True  # what a scheduler's wrapper of `step` records
    update = compat.VariableTracker.build(tx, torch_optim.own_step(optimizer))
    return _BoundStep(self, update, source=compat.attribute_source(self, "step"))


def _noted(optimizer: Any, tx: Any) -> Notes:
    torch_optim.make_state(optimizer, tx)
    notes = _notes_of(tx)
    if all(known is not optimizer for known in notes.optimizers):
        notes.optimizers.append(optimizer)
    return notes


class _BoundStep(compat.VariableTracker):
    """``opt.step`` as a value that Dynamo can call: the stand-in with this optimizer's update."""

    def __init__(self, optimizer: Any, update: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.optimizer, self.update = optimizer, update
        self.check: Callable | None = None  # behind an update that a `GradScaler` may leave out

    def call_function(self, tx: Any, args: Any, kwargs: dict) -> Any:
        if _notes.resumed and not _notes_of(tx).backwards:  # see `install`
            telling.settle(_notes, whole=False)
            breaks.break_graph("an update without its backward", "", "")
        build = compat.VariableTracker.build
        packed = compat.tuple_variable(list(args))
        named = compat.dict_variable(tx, kwargs)
        value = build(tx, torch_optim.step).call_function(
            tx, [self.optimizer, self.update, packed, named], {})
        if self.check:
            self.check(self.optimizer.value, value)
        _notes_of(tx).updates += 1
        return value


def _autograd_grad(original: Callable, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.grad` with its seed and its results marked."""
    build = compat.VariableTracker.build
    kwargs |= zip(("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused"),
                  args)
    outputs, inputs = kwargs.pop("outputs"), dynamo.sequence(tx, kwargs.pop("inputs"))  # or a generator
    backward.refuse_nested(tx)
    backward.refuse_hooks(tx, dynamo.tensors_in(inputs), _notes)
    if (marked := backward.marked(tx, outputs, kwargs.get("grad_outputs"))) is not None:
        kwargs["grad_outputs"] = marked
    try:
        with used_up.using_up(tx.output):
            result = original(self, tx, outputs, inputs, **kwargs)
    except compat.Unsupported as error:
        # Cut in two here, the second half would find no graph to go through; eager knows whether
        # it may (the first backward freed nothing it needs), and says so if not.
        if "already consumed" in str(error):
            telling.tell_of_break(_notes, error, "backward() goes through a graph that an earlier one has used up",
                                  "pass retain_graph=True to the earlier one, or add the losses up first")
            if not breaks.demands_one_graph(tx.output):
                breaks.run_in_eager(error)
        raise
    except compat.TorchRuntimeError as error:
        if "to not have been used in the graph" in str(error):
            raise
        breaks.break_graph("a gradient that cannot be traced", breaks.cause_of(error), "take this derivative out of the step")
    _notes_of(tx).backwards += 1
    create = kwargs.get("create_graph")
    if create is not None and getattr(create, "value", None):
        return result  # a second derivative may follow: the mark is not differentiable
    return compat.map_tensors(tx, result, lambda g: build(
        tx, torch.ops.memopt.gradient.default).call_function(tx, [g], {}))


def _validate_outputs(original: Callable, self: Any, rv: Any, tx: Any) -> None:
    """Let used-up tensors out (the backend detaches them); refuse what is still differentiable."""
    _notes.replaced_gradients = compat.replaced_gradients(self)
    if not self.autograd_grad_consumed_grad_fns:
        return
    values = {v.as_proxy().node.name: compat.fake_value(v) for v in rv if isinstance(v, compat.TensorVariable)}
    leaked = [name for name, fake in values.items()
              if getattr(fake, "grad_fn", None) is not None and not used_up.used_up(self, fake)]
    if leaked:
        tx.speculation_log.autograd_grad_leaked_tensors = leaked  # named in the reason by 2.13
        tx.speculation_log.graph_break_on_autograd_grad = True
        raise compat.AutogradGradRestartAnalysis(
            restart_reason="the step returns a tensor that is still differentiable")


def _wrap_symfloat(original: Callable, self: Any, value: float) -> Any:
    """A number of a parameter group becomes a 0-dim float64 input once it may change.

    As a tensor it takes part in every operator; as a symbolic float it would be specialized,
    and the step recompiled, wherever an operator wants a plain number.
    """
    name = compat.source_name(self.source)
    if ".param_groups[" not in name or not math.isfinite(value):
        return original(self, value)
    will = name.endswith("['lr']") or (name.endswith(("['momentum']", "['betas'][0]")) and any(
        map(torch_optim.cycles_momentum, _notes.optimizers)))
    if not (will or compat.changes(self, value)):
        return original(self, value)
    return compat.number_input(self, value)


def _compare(original: Callable, compare: Callable, tx: Any, args: Any, kwargs: Any) -> Any:
    """``momentum != 0`` and the like are decided now, with a guard on the answer."""
    if of_data := branches.compared(original, compare, tx, args, kwargs):
        return of_data
    answer = decided.decided([each.realize() for each in args], compare, f"{compare.__name__} of numbers")
    return original(tx, args, kwargs) if answer is None else compat.VariableTracker.build(tx, answer[0])


def _checked(tx: Any) -> None:
    _notes_of(tx).replaced_at_checks.append(frozenset(compat.replaced_gradients(tx.output)))


def _log_graph_break(original: Callable, self: Any, code_options: Any, reason: str = "",
                     exc: Any = None, **kwargs: Any) -> None:
    counted = _notes_of(self)
    if counted.reads_behind or counted.reads and not (counted.backwards and counted.updates):
        counted.read_at_once("the graph ends")
    telling.tell_where_it_ends(counted, self.output, exc if exc is not None else kwargs.get("exc"))
    return original(self, code_options, reason, exc, **kwargs)


_FORMS: dict[Any, Callable] = {}
FOLD = ("memopt_compile.optim.adam", "fold")
CLIPPED = ("memopt_compile.optim.base", "clipped")
MICRO_BATCHES = ("memopt_compile.api", "micro_batches")


def _next_item(original: Callable, self: Any, tx: Any) -> Any:
    notes = _notes_of(tx)
    return iterations.next_item([] if notes.unroll else notes.loops, original, self, tx)


def _call_function(original: Callable, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if _notes.left:
        breaks.run_in_eager(_notes.reason)
    if (owner := getattr(self, "obj", None) or (args[0] if args else None)) is not None:
        guards.guard_classes(tx, owner, self.fn)
    prepared = functions.prepare(self, args, kwargs, tx)
    if prepared is not None:
        return prepared
    if (self.fn.__module__, self.fn.__name__) == MICRO_BATCHES:
        chunks = original(self, tx, args, kwargs)
        _notes_of(tx).loops.append(iterations.Loop(chunks.items))
        return chunks
    if getattr(self.fn, "__code__", None) is torch_optim.FALLBACK:
        self = compat.UserFunctionVariable(self.fn.__wrapped__)
    form = _FORMS.get(self.fn) or _notes.eager and torch_optim.FOR_THE_EAGER_LOWERING.get(self.fn) or None
    if form is None and "fused" in kwargs and self.fn.__module__.startswith("torch.optim"):
        # Dynamo may not enter a fused update: choose the loop before the optimizer chooses.
        loop = compat.VariableTracker.build(tx, False)
        kwargs = {**kwargs, "foreach": loop, "fused": loop}
    if _notes.folds and _notes.backwards > 1:
        if (self.fn.__module__, self.fn.__name__) == FOLD:
            bound = hasattr(self, "obj")  # by super() it is a function, and the object an argument
            form = (compat.UserMethodVariable(folding.moments, self.obj) if bound
                    else compat.UserFunctionVariable(folding.moments))
            return original(form, tx, args, kwargs)
        if (self.fn.__module__, self.fn.__name__) == CLIPPED:
            form = folding.clipped
        form = folding.adam if compat.single_tensor_adam in (form, self.fn) else form
    asked = kwargs.get("capturable")
    if form in torch_optim.CAPTURABLE and asked is not None:
        if compat.constant_value(asked) == (True, True):  # eager too runs the branch-free form
            form = torch_optim.CAPTURABLE[form]
    if form is not None and form is not self.fn and type(self) is compat.UserFunctionVariable:
        self = compat.UserFunctionVariable(form)
    if torch_optim.is_loop(self.fn) or self.fn is folding.adam:
        momentum = kwargs.get("momentum")  # with it SGD fills in the buffers that are not there yet
        gaps = momentum is None or compat.constant_value(momentum) == (True, 0)
        return update_copies.each_kind_once(lambda lists: original(self, tx, lists, kwargs), tx, args, gaps)
    return original(self, tx, args, kwargs)


# ---------------------------------------------------------------- putting it in force


@contextlib.contextmanager
def scope(step: Any, frame: Any, options: Any = None,
          left: Callable[[Any, Notes], None] = lambda options, notes: None) -> Iterator[Notes]:
    """Trace a frame of `step` for whole-step capture. `left` is told of one that Dynamo leaves to Python, and may refuse."""
    global _notes
    given, code, own = options or {}, frame.f_code, frames.users_code(frame)
    outer, _notes = _notes, Notes(
        frame=code, function=own, step=step, where=f"{own.co_filename.rsplit('/', 1)[-1]}:{own.co_firstlineno}",
        resumed=code.co_name.startswith("torch_dynamo_resume_in_"), stepped=step in telling.stepped,
        folds=given.get("accumulate") == "optimizer_states", eager=given.get("lowering") == "eager",
        needs="memory_budget" if given.get("memory_budget") is not None else "accumulate" if given.get(
            "accumulate", "gradients") != "gradients" else "",
        checks=not given.get("zero"))  # the others would wait for the rank whose check fails
    if not _FORMS:
        _FORMS.update({**torch_optim.single_tensor_forms(), **functions.FORMS})
    if "torch.distributed.tensor" in sys.modules:
        from ..distributed import norms

        compat.keep_placements(torch.ops.memopt.gradient.default)
        _FORMS[torch.nn.utils.get_total_norm] = norms.total_norm
    # Tracing makes millions of objects that stay. Going through all of them again and again takes long.
    collected = gc.get_threshold()
    gc.set_threshold(*collected[:2], 1000)
    try:
        with dynamo.tracing_scope(
            method_backward=backward.method_backward, optimizer_getattr=_optimizer_getattr,
            validate_outputs=_validate_outputs, wrap_symfloat=_wrap_symfloat,
            autograd_grad=_autograd_grad, call_function=_call_function,
            call_logger=functions.call_logger, call_skipped=functions.call_skipped,
            call_recurrent=functions.call_recurrent, forms=functions.TORCH_FORMS,
            add_product=functions.add_product, compare=_compare,
            log_graph_break=_log_graph_break, next_item=_next_item,
            reads=lambda tx, tensor: read_later.waits(tx, tensor, _notes_of(tx)),
            behind=lambda tx: read_later.end_behind(tx, _notes_of(tx)), checks=lambda tx: _notes.checks and breaks.is_outermost(tx.output), checked=_checked,
        ):
            yield _notes
    except breaks.LEFT as error:
        if _notes.backwards or breaks.is_of_the_tracer(error) and not (_notes.resumed and _notes.stepped):
            telling.tell_of_break(_notes, error)
        elif "backward" in code.co_names or not (_notes.resumed or _notes.stepped):  # a metric behind the step is neither
            telling.settle(_notes, whole=False)
        if breaks.is_recompile_limit(error):
            tail = _notes.resumed and all(c.kind != "step" for c in compilations(code))
            (telling.tell_of_a_tail if tail else telling.tell_of_the_limit)(_notes)
        left(options, _notes)
        raise
    finally:
        gc.set_threshold(*collected)
        telling.note_place(_notes)
        _notes = outer


def install(is_ours: Callable[[Any], bool], left: Callable[[Any, Notes], None]) -> Callable[[], None]:
    """Trace every frame whose backend satisfies `is_ours` in `scope`, which `left` goes to; returns the undo."""
    def wrap(backend: Any, options: Any, step: Any, frame: Any) -> Any:
        if not is_ours(backend):
            return contextlib.nullcontext()
        # In an update outside its step there is nothing to save, and each step has gradients of its own to trace it for.
        beside = torch_optim.is_update(frame) or telling.is_beside(step, frame.f_code)
        return None if beside else scope(step, frame, options, left)

    return frames.frame_hook(wrap)
