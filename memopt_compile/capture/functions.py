"""What Dynamo does while it traces for memopt with functions that would end its graph.

Each rule keeps what the function means. What it cannot keep (a warning that is an error, say) is
left to Dynamo, and so to the ordinary path.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from .. import compat, ctc, gaussian_loss, margin_loss
from ..compat import breaks, guards, python, schedulers
from . import scaler, torch_optim

# Functions that make a module ready for its first forward, and do nothing after that. They run
# as they are while the step is traced; in the trace they would end its graph for good.
PREPARATIONS = {("transformers.utils.output_capturing", "maybe_install_capturing_hooks")}

# The cells of a recurrent network that are traced: each is some forty operators, and all of them
# together are then about as many as a GPT of nine layers has.
MOST_CELLS = 128


def is_causal_mask(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """`nn.Transformer` reads off a mask's numbers whether it is the causal one, for speed only:
    where this says no, the mask itself is applied."""
    return is_causal is True


def cumulative_batch_norm(self: Any, x: Any) -> Any:
    """A `BatchNorm` with ``momentum=None``: its statistics are the means over all batches. (torch makes a number of
    their count.)"""
    if self.momentum is not None or not self.training or not self.track_running_stats:
        raise AssertionError("another module than that of which this was asked")
    self._check_input_dim(x)
    self.num_batches_tracked.add_(1)
    mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
    result = torch.nn.functional.batch_norm(x, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
    with torch.no_grad():
        share = 1.0 / self.num_batches_tracked.to(torch.float64)
        for running, of_batch in ((self.running_mean, mean), (self.running_var, variance)):
            running.copy_((1 - share) * running + share * of_batch)
    return result


def checkpoint_sequential(functions: Any, segments: int, input: Any, use_reentrant: bool | None = None,
                          **settings: Any) -> Any:
    """The function of this name in `torch.utils.checkpoint`, which Dynamo may not enter."""
    functions = list(functions.children() if isinstance(functions, torch.nn.Sequential) else functions)

    def run(part: list) -> Callable:
        def together(value: Any) -> Any:
            for function in part:
                value = function(value)
            return value

        return together

    length = len(functions) // segments
    for i in range(segments - 1):
        part = functions[i * length:(i + 1) * length]
        input = checkpoint(run(part), input, use_reentrant=use_reentrant is not False, **settings)
    return run(functions[(segments - 1) * length:])(input)


def backward(tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False,
             grad_variables: None = None, inputs: Any = None) -> None:
    """`torch.autograd.backward`, which Dynamo may not enter: that of the sum of all."""
    if grad_variables is not None:
        raise RuntimeError("grad_variables is deprecated. Use grad_tensors instead.")
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    gradients = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else list(grad_tensors or [None] * len(tensors))
    if len(tensors) != len(gradients):
        raise RuntimeError(f"got {len(tensors)} tensors and {len(gradients)} gradients")
    if len(tensors) > 1:
        for i, tensor in enumerate(tensors):
            if not tensor.requires_grad:
                raise RuntimeError(f"element {i} of tensors does not require grad and does not have a grad_fn")
            if gradients[i] is None and tensor.numel() != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
        tensors = [sum((tensor if gradient is None else tensor * gradient).sum()
                       for tensor, gradient in zip(tensors, gradients))]
        gradients = [None]
    if tensors:
        tensors[0].backward(gradients[0], retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)


FORMS = {compat.detect_is_causal_mask: is_causal_mask}
TORCH_FORMS = {torch.nn.functional.ctc_loss: ctc.ctc_loss,
               torch.nn.functional.gaussian_nll_loss: gaussian_loss.gaussian_nll_loss,
               torch.nn.functional.multilabel_margin_loss: margin_loss.multilabel_margin_loss,  # of operators
               torch.nn.functional.multi_margin_loss: margin_loss.multi_margin_loss}


BATCH_NORM = torch.nn.BatchNorm1d.forward.__code__  # of all of them


def _is_cumulative(norm: Any) -> bool:
    return norm.momentum is None and norm.training and norm.track_running_stats and norm.num_batches_tracked is not None


def inherited_step(step: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`super().step()` of an optimizer of torch's, whose wrapper ends a graph on purpose."""
    with torch.no_grad():
        return step(self, *args, **kwargs)


class Signature(NamedTuple):
    """What ``inspect.signature`` gives: the names of what a function takes. (Of their defaults nothing is known.)"""

    parameters: dict[str, None]


def signature(*names: str) -> Signature:
    return Signature(dict.fromkeys(names))


def _signature(tx: Any, function: Any) -> Any:
    """``inspect.signature`` of a function or method in a trace, None of anything else: Dynamo cannot trace that module."""
    function = function.realize()
    if not isinstance(function, compat.UserFunctionVariable):
        return None
    names = list(inspect.signature(function.fn).parameters)[isinstance(function, compat.UserMethodVariable):]
    return compat.UserFunctionVariable(signature).call_function(
        tx, [compat.VariableTracker.build(tx, name) for name in names], {})


def prepare(called: Any, args: Any, kwargs: Any, tx: Any) -> Any:
    """The result of one of `PREPARATIONS`, a `GradScaler`'s method or `inherited_step`, None for any other function."""
    function, owner = called.fn, getattr(called, "obj", None)
    python.refuse_copy(function, owner)
    if getattr(function, "__code__", None) in (compat.UPDATE_WRAPPER, compat.HOOKS_WRAPPER):
        step, given = compat.VariableTracker.build(tx, function.__wrapped__), [*([owner] if owner else []), *args]
        if function.__code__ is compat.UPDATE_WRAPPER:
            return compat.UserFunctionVariable(inherited_step).call_function(tx, [step, *given], kwargs)
        hooked = [given[0], step, compat.tuple_variable(given[1:]), compat.dict_variable(tx, kwargs)]
        return compat.UserFunctionVariable(torch_optim.step).call_function(tx, hooked, {})
    if getattr(function, "__code__", None) is BATCH_NORM and _is_cumulative(compat.object_behind(owner or args[0])):
        given = [owner, *args] if owner else args
        return compat.UserFunctionVariable(cumulative_batch_norm).call_function(tx, given, kwargs)
    if function is inspect.signature and len(args) == 1 and not kwargs:
        return _signature(tx, args[0])
    if (function.__module__, function.__name__) == (schedulers.MODULE, "step") and owner and not (args or kwargs):
        return schedulers.put_off(tx, owner)
    if function.__module__ == scaler.MODULE:
        return scaler.call(tx, function, owner, args, kwargs)
    if function is scaler.update_of:
        args[0].realize().check = scaler.check(tx, args[1])
    if kwargs or (function.__module__, function.__name__) not in PREPARATIONS:
        return None
    given = [compat.object_behind(a) for a in args]
    if not all(isinstance(g, torch.nn.Module) for g in given):
        return None
    return compat.VariableTracker.build(tx, function(*given))


def call_logger(original: Callable, self: Any, tx: Any, name: str, args: Any, kwargs: dict) -> Any:
    """``logger.warning_once(...)`` of `transformers` is said while tracing: that is once. What a logger's level keeps
    unsaid is nothing, as long as it does."""
    if guards.says_nothing(self, name):
        return compat.VariableTracker.build(tx, None)
    known = _constants(args, kwargs)
    if name.endswith("_once") and hasattr(self.value, name) and known:
        getattr(self.value, name)(*known[0], **known[1])
        return compat.VariableTracker.build(tx, None)
    return original(self, tx, name, args, kwargs)


def call_skipped(original: Callable, self: Any, tx: Any, args: Any, kwargs: dict) -> Any:
    """Functions that Dynamo would not enter. ``warnings.warn`` speaks while tracing and names the line that it would
    name in eager, where it is heard once too, unless Python's filters ask for more."""
    if self.value is torch.utils.checkpoint.checkpoint_sequential:
        return compat.UserFunctionVariable(checkpoint_sequential).call_function(tx, args, kwargs)
    if self.value is torch.autograd.backward:
        return compat.UserFunctionVariable(backward).call_function(tx, args, kwargs)
    if python.draws(self.value):
        python.refuse_drawing()
    known = _constants(args, kwargs) if self.value is warnings.warn else None
    if known and _warn(tx, *known[0], **known[1]):
        return compat.VariableTracker.build(tx, None)
    return original(self, tx, args, kwargs)


def _warn(tx: Any, message: Any, category: Any = None, stacklevel: int = 1, **other: Any) -> bool:
    if other:
        return False
    for _ in range(stacklevel - 1):
        tx = tx.parent or tx
    try:
        warnings.warn_explicit(message, category or UserWarning, tx.f_code.co_filename, tx.lineno,
                               registry=tx.f_globals.setdefault("__warningregistry__", {}))
    except Warning:  # Python was told to raise it: in the step, not here
        return False
    return True


def call_recurrent(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """A recurrent network is traced cell by cell, unless it has too many of them."""
    if len(args) != 9 or not compat.constant_value(args[3])[0]:
        return None  # packed sequences: their lengths are numbers in a tensor, which Dynamo refuses
    layers, dropout, train, both, batch_first = (compat.constant_value(a)[1] for a in args[4:])
    steps = compat.fake_value(args[0].realize()).shape[1 if batch_first else 0]
    cells = steps * layers * (2 if both else 1)
    if cells > MOST_CELLS:
        breaks.break_graph(
            "a recurrent network over a long sequence",
            f"one operator in eager, but {cells} cells of their own in a graph",
            f"cut the sequence so that steps, layers and directions make at most {MOST_CELLS}")
    if dropout and train and layers > 1:  # torch's trace of it has none
        return compat.UserFunctionVariable(layer_by_layer).call_function(tx, [self, *args], {})
    return None


def layer_by_layer(network: Callable, x: Any, state: Any, weights: Any, biased: bool, layers: int, dropout: float,
                   train: bool, both: bool, batch_first: bool) -> tuple:
    """`network` with its dropout between layers, as the kernel draws it: over (time, batch, features)."""
    states = state if isinstance(state, tuple | list) else (state,)
    directions, each = 2 if both else 1, len(weights) // layers
    x = x.transpose(0, 1) if batch_first else x
    ends = []
    for layer in range(layers):
        x = torch.dropout(x, dropout, train) if layer else x
        start = tuple(s[layer * directions:(layer + 1) * directions] for s in states)
        x, *end = network(x, start if len(states) > 1 else start[0], weights[layer * each:(layer + 1) * each], biased,
                          1, 0.0, train, both, False)
        ends.append(end)
    return x.transpose(0, 1) if batch_first else x, *(torch.cat(parts) for parts in zip(*ends))


def add_product(original: Callable, self: Any, tx: Any, a: Any, b: Any, *, value: Any = None) -> Any:
    """``addcmul_`` with a plain number stays the one operator that eager runs. (Dynamo takes it
    apart, for the sake of numbers that are tensors, and the product needs a buffer.)"""
    if value is not None and compat.constant_value(value)[0]:
        return None
    return original(self, tx, a, b, value=value)


def _constants(args: Any, kwargs: dict) -> tuple[list, dict] | None:
    """The arguments of a call as plain values, None if Dynamo does not know one of them."""
    known = [compat.constant_value(a) for a in (*args, *kwargs.values())]
    values = [value for _, value in known]
    return ((values[:len(args)], dict(zip(kwargs, values[len(args):])))
            if all(ok for ok, _ in known) else None)
