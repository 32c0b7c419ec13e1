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
import inspect
import logging
import math
import sys
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator

import torch
from torch import Tensor
from torch.optim.asgd import _single_tensor_asgd
from torch.optim.radam import _single_tensor_radam

from . import compat

log = logging.getLogger("memopt_compile")


@torch.library.custom_op("memopt::seed", mutates_args=())
def seed(loss: Tensor) -> Tensor:
    """The gradient of the loss by itself: ones. Marks the start of a backward."""
    return torch.ones_like(loss)


@torch.library.custom_op("memopt::gradient", mutates_args=())
def gradient(value: Tensor) -> Tensor:
    """A copy of `value`. Marks it as the whole gradient of one leaf from one backward."""
    return value.clone()


seed.register_fake(lambda loss: torch.ones_like(loss))
gradient.register_fake(lambda value: torch.empty_like(value))


@dataclass
class Notes:
    """What was seen while one frame was traced, for the backend that gets its graph."""

    frame: Any = None
    where: str = ""
    resumed: bool = False
    reason: str | None = None
    backwards: int = 0
    replaced_gradients: dict[str, Any] = field(default_factory=dict)
    numbers: dict[Any, Any] = field(default_factory=dict)
    optimizers: list[Any] = field(default_factory=list)


_notes = Notes()


def notes() -> Notes:
    """The notes of the frame being traced now."""
    return _notes


# ---------------------------------------------------------------- stand-ins that Dynamo traces


def _zero_grad(self: Any, set_to_none: bool = True) -> None:
    """`Optimizer.zero_grad` without its profiler scope, which Dynamo may not enter."""
    for group in self.param_groups:
        for parameter in group["params"]:
            if set_to_none:
                # Not asking first whether there is a gradient spares a guard on it, and with
                # it the recompilation between the first call and the second.
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()


def _step(self: Any, update: Callable, args: tuple, kwargs: dict) -> Any:
    """`Optimizer.step`: hooks before, the optimizer's own update without grad, hooks after."""
    for hook in self._optimizer_step_pre_hooks.values():
        result = hook(self, args, kwargs)
        if result is not None:
            args, kwargs = result
    with torch.no_grad():
        value = update(self, *args, **kwargs)
    for hook in self._optimizer_step_post_hooks.values():
        hook(self, args, kwargs)
    return value


def _get_value(step: Any) -> Any:
    """The step count in float64, as eager's ``.item()`` gives it to the bias corrections."""
    return step.to(torch.float64) if isinstance(step, Tensor) else step


def _to_scalar(number: Any) -> Any:
    """A learning rate or beta as it is: capture has made a 0-dim tensor of it already."""
    return number


def _radam(*lists: Any, capturable: bool, **kwargs: Any) -> None:
    """RAdam asks the step count whether to rectify; its capturable form selects instead."""
    steps = [step.to(torch.float64) for step in lists[4]]
    _single_tensor_radam(*lists[:4], steps, capturable=True, **kwargs)
    for step, counted in zip(lists[4], steps):
        step.copy_(counted)


def _asgd(*lists: Any, capturable: bool, **kwargs: Any) -> None:
    """ASGD asks whether it averages yet; its capturable form averages with weight one."""
    steps = [step.to(torch.float64) for step in lists[5]]
    _single_tensor_asgd(*lists[:5], steps, capturable=True, **kwargs)
    for step, counted in zip(lists[5], steps):
        step.copy_(counted)


def _single_tensor_forms() -> dict[Any, Callable]:
    """`foreach` and fused updates need every gradient at once: trace the loop over tensors."""
    forms: dict[Any, Callable] = {}
    for name in ("adadelta", "adagrad", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop",
                 "rprop", "sgd", "_adafactor", "_muon"):
        module = sys.modules.get(f"torch.optim.{name}")
        single = getattr(module, f"_single_tensor_{name.lstrip('_')}", None)
        for prefix in ("_multi_tensor_", "_fused_"):
            other = getattr(module, prefix + name.lstrip("_"), None)
            if single is not None and other is not None:
                forms[_undisabled(other)] = single
                forms[other] = single
        for name, form in (("_get_value", _get_value), ("_to_scalar", _to_scalar)):
            if hasattr(module, name):
                forms[getattr(module, name)] = form
    return {**forms, _single_tensor_asgd: _asgd, _single_tensor_radam: _radam}


def _undisabled(function: Callable) -> Callable:
    return getattr(function, "_torchdynamo_orig_callable", function)


def _own_step(optimizer: torch.optim.Optimizer) -> Callable:
    """The class's `step` without torch's hook, grad-mode and graph-break wrappers."""
    step = _undisabled(type(optimizer).step)
    wrappers = {"profile_hook_step.<locals>.wrapper", "_use_grad_for_differentiable.<locals>._use_grad",
                "context_decorator.<locals>.decorate_context",
                "Optimizer.profile_hook_step.<locals>.wrapper"}
    while getattr(step, "__qualname__", "") and step.__code__.co_qualname in wrappers:
        step = step.__wrapped__
    return step


# ---------------------------------------------------------------- Dynamo's methods, replaced


def _optimizer_getattr(original: Callable, self: Any, tx: Any, name: str) -> Any:
    optimizer = self.value
    if name == "zero_grad" and "zero_grad" not in vars(optimizer):
        if type(optimizer).zero_grad is torch.optim.Optimizer.zero_grad:
            return compat.UserMethodVariable(_zero_grad, self)
    if name == "step":
        return _traced_step(self, tx)
    if name == "_init_group" and hasattr(optimizer, "_init_group"):
        return compat.UserMethodVariable(_undisabled(type(optimizer)._init_group), self)
    # Past OptimizerVariable, which would make `capturable` true and its parameters static.
    return super(compat.OptimizerVariable, self).var_getattr(tx, name)


def _traced_step(self: Any, tx: Any) -> Any:
    optimizer = self.value
    if isinstance(optimizer, torch.optim.LBFGS) or optimizer.defaults.get("differentiable"):
        compat.break_graph(
            f"{type(optimizer).__name__}.step cannot be captured",
            "its update runs backward passes or is itself differentiated",
            "use a first-order optimizer with differentiable=False to save memory here",
        )
    if compat.global_optimizer_hooks():
        compat.break_graph("global optimizer hooks", "they are not part of the step",
                           "register the hook on the optimizer itself")
    _make_state(optimizer, tx)
    _notes.optimizers.append(optimizer)
    if hasattr(optimizer, "_opt_called") or "step" in vars(optimizer):
        optimizer._opt_called = True  # what a scheduler's wrapper of `step` records
    update = compat.VariableTracker.build(tx, _own_step(optimizer))
    return _BoundStep(self, update, source=compat.attribute_source(self, "step"))


class _BoundStep(compat.VariableTracker):
    """``opt.step`` as a value that Dynamo can call: `_step` with this optimizer's update."""

    def __init__(self, optimizer: Any, update: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.optimizer, self.update = optimizer, update

    def call_function(self, tx: Any, args: Any, kwargs: dict) -> Any:
        build = compat.VariableTracker.build
        packed = compat.tuple_variable(list(args))
        named = compat.dict_variable(tx, kwargs)
        return build(tx, _step).call_function(
            tx, [self.optimizer, self.update, packed, named], {})


def _make_state(optimizer: torch.optim.Optimizer, tx: Any) -> None:
    """Make the state of parameters that have a gradient here and none yet, as eager would.

    State made inside the trace would be a first graph of its own; made here, the first call
    and the thousandth run the same graph.
    """
    if not hasattr(optimizer, "_init_group"):
        return
    init = _undisabled(type(optimizer)._init_group)
    lists = len(inspect.signature(init).parameters) - 2
    for group in optimizer.param_groups:
        new = [p for p in group["params"]
               if not optimizer.state.get(p) and compat.pending_gradient(tx, p)]
        if not new:
            continue
        gradients = [p.grad for p in new]
        try:
            for p in new:
                p.grad = torch.zeros((), dtype=p.dtype, device=p.device).expand_as(p)
            init(optimizer, {**group, "params": new}, *([] for _ in range(lists)))
            if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and not group["dampening"]:
                # SGD's first step copies the gradient: with a zero buffer 0·momentum + g is g.
                for p in new:
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        finally:
            for p, old in zip(new, gradients):
                p.grad = old


def _leaves(loss: Tensor) -> list[Tensor]:
    """The leaves that autograd would give a gradient to, found in the loss's own graph."""
    seen, stack, leaves = set(), [loss.grad_fn], []
    while stack:
        function = stack.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if type(function).__name__ == "AccumulateGrad":
            leaves.append(function.variable)
        stack.extend(parent for parent, _ in function.next_functions)
    return leaves


def _method_backward(original: Callable, self: Any, tx: Any, gradient: Any = None,
                     retain_graph: Any = None, create_graph: Any = None,
                     inputs: Any = None) -> Any:
    if inputs is None:
        known = compat.tensor_variables(tx.output)
        leaves = _leaves(compat.fake_value(self))
        variables = [known.get(id(leaf)) for leaf in leaves]
        if not leaves or any(v is None or v.source is None for v in variables):
            compat.break_graph(
                "backward() reaches leaves that the trace does not know",
                f"{sum(v is None or v.source is None for v in variables)} of {len(leaves)} leaf "
                "tensors of the loss were made outside the traced step",
                "compute the loss inside the compiled step, from parameters it can see",
            )
        # Order of first use as a graph input: the order in which eager would list parameters.
        position = {id(node): i for i, node in enumerate(tx.output.graph.nodes)}
        variables.sort(key=lambda v: position.get(id(v.as_proxy().node), 0))
        for variable in variables:
            _refuse_hooks(compat.real_value(tx, variable))
        inputs = compat.list_variable(variables)
    return original(self, tx, gradient, retain_graph, create_graph, inputs)


def _refuse_hooks(leaf: Any) -> None:
    if isinstance(leaf, Tensor) and (leaf._backward_hooks or leaf._post_accumulate_grad_hooks):
        compat.break_graph(
            "a parameter has a gradient hook", "hooks on parameters do not run inside the graph",
            "remove the hook, or apply the same change to p.grad between backward and step")


def _autograd_grad(original: Callable, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.grad` with its seed and its results marked."""
    build = compat.VariableTracker.build
    outputs = args[0] if args else kwargs.get("outputs")
    single = compat.only_tensor(outputs)
    given = (args[2] if len(args) > 2 else kwargs.get("grad_outputs"))
    implicit = given is None or (hasattr(given, "value") and given.value is None)
    if implicit and single is not None and compat.fake_value(single).numel() == 1:
        with compat.traced_without_grad(tx):
            start = build(tx, torch.ops.memopt.seed.default).call_function(tx, [single], {})
        args, kwargs = args[:2] + args[3:], {**kwargs, "grad_outputs": compat.list_variable([start])}
        if args[2:]:  # the flags that stood after grad_outputs
            kwargs.update(zip(("retain_graph", "create_graph", "only_inputs", "allow_unused"), args[2:]))
            args = args[:2]
    result = original(self, tx, *args, **kwargs)
    _notes.backwards += 1
    create = kwargs.get("create_graph")
    if create is not None and getattr(create, "value", None):
        return result  # a second derivative may follow: the mark is not differentiable
    return compat.map_tensors(tx, result, lambda g: build(
        tx, torch.ops.memopt.gradient.default).call_function(tx, [g], {}))


def _validate_outputs(original: Callable, self: Any, rv: Any, tx: Any) -> None:
    """Let used-up tensors out (the backend detaches them); refuse what is still differentiable."""
    _notes.replaced_gradients = compat.replaced_gradients(self)
    consumed = self.autograd_grad_consumed_grad_fns
    if not consumed:
        return
    for variable in rv:
        fake = compat.fake_value(variable) if isinstance(variable, compat.TensorVariable) else None
        if fake is None or not fake.requires_grad or fake.grad_fn is None:
            continue
        if not (compat.output_graph.collect_reachable_grad_fns([(fake, None)]) & consumed):
            tx.speculation_log.autograd_grad_leaked_tensors.append(variable.as_proxy().node.name)
    if tx.speculation_log.autograd_grad_leaked_tensors:
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
    if not (name.endswith("['lr']") or compat.changes(self, value)):
        return original(self, value)
    number = compat.number_input(self, value)
    _notes.numbers[number.as_proxy().node] = (self.get_source(), value)
    return number


def _compare(original: Callable, compare: Callable, tx: Any, args: Any, kwargs: Any) -> Any:
    """``momentum != 0`` and the like are decided now, with a guard on the answer."""
    known = _notes.numbers.get(compat.node_of(args[0]))  # may make it known, so comes first
    constant, other = compat.constant_value(args[1].realize())
    if known and constant and isinstance(other, (int, float)):
        source, value = known
        answer = compare(value, other)
        compat.guard_value(source, lambda v: compare(v, other) == answer,
                           f"{compat.source_name(source)} {compare.__name__} {other}")
        return compat.VariableTracker.build(tx, answer)
    return original(tx, args, kwargs)


_told: set[tuple] = set()


def forget() -> None:
    """Tell again of graphs that end early, as after `torch.compiler.reset()`."""
    _told.clear()


def _log_graph_break(original: Callable, self: Any, code_options: Any, reason: str = "",
                     exc: Any = None, **kwargs: Any) -> None:
    """One line for each place where a step stops being one graph. After the optimizer has run
    (a ``loss.item()`` to return, say) the step is whole already, and nothing is lost."""
    error = exc if exc is not None else kwargs.get("exc")
    place = compat.break_place(error)
    if place and not (_notes.backwards and _notes.optimizers) and not _notes.resumed:
        cause, remedy = compat.break_reason(error)
        file, line, code = place
        where = f"{file.rsplit('/', 1)[-1]}:{line} `{code.strip()}`"
        _notes.reason = f"{where}: {cause}"
        if (file, line) not in _told:
            _told.add((file, line))
            log.warning("%s: not captured whole: %s. It runs by the ordinary path, with right "
                        "numbers and without memopt's savings. Remedy: %s", where, cause, remedy)
    return original(self, code_options, reason, exc, **kwargs)


_FORMS: dict[Any, Callable] = {}


def _call_function(original: Callable, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    form = _FORMS.get(self.fn) if self.fn.__module__.startswith("torch.optim") else None
    asked = kwargs.get("capturable")
    if form in (_radam, _asgd) and asked is not None and compat.constant_value(asked) == (True, True):
        form = None
    if form is not None and type(self) is compat.UserFunctionVariable:
        return original(compat.UserFunctionVariable(form), tx, args, kwargs)
    return original(self, tx, args, kwargs)


# ---------------------------------------------------------------- putting it in force


@contextlib.contextmanager
def scope(code: Any = None) -> Iterator[Notes]:
    """Trace the frame of `code` for whole-step capture; others in the process are untouched."""
    global _notes
    outer, _notes = _notes, Notes()
    if code is not None:
        _notes.frame = code
        _notes.where = f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"
        _notes.resumed = code.co_name.startswith("torch_dynamo_resume_in_")
    if not _FORMS:
        _FORMS.update(_single_tensor_forms())
    try:
        with compat.tracing_scope(
            method_backward=_method_backward, optimizer_getattr=_optimizer_getattr,
            validate_outputs=_validate_outputs, wrap_symfloat=_wrap_symfloat,
            autograd_grad=_autograd_grad, call_function=_call_function,
            compare=_compare,
            log_graph_break=_log_graph_break,
        ):
            yield _notes
    finally:
        _notes = outer


def install(is_ours: Callable[[Any], bool]) -> Callable[[], None]:
    """Trace every frame whose backend satisfies `is_ours` in `scope`; returns the undo."""
    return compat.frame_hook(
        lambda backend, code: scope(code) if is_ours(backend) else contextlib.nullcontext())
