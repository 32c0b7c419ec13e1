"""What Dynamo traces in place of `torch.optim`'s own functions, and state made beforehand."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from .. import compat
from ..compat import breaks, guards
from ..optim import one_operator

# Around every functional optimizer of torch's: it leaves the graph where step counts are on CUDA, as they
# are with `fused=True`. Here they are values like others: see `get_value`.
FALLBACK = adam.__code__


def zero_grad(self: Any, set_to_none: bool = True) -> None:
    """`Optimizer.zero_grad` without its profiler scope, which Dynamo may not enter."""
    for group in self.param_groups:
        for parameter in group["params"]:
            if set_to_none:
                # Not asking first whether there is a gradient spares a guard on it, and with
                # it the recompilation between the first call and the second.
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()


def step(self: Any, update: Callable, args: tuple, kwargs: dict) -> Any:
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


def get_value(step: Any) -> Any:
    """The step count in float64, as eager's ``.item()`` gives it to the bias corrections."""
    return step.to(torch.float64) if isinstance(step, Tensor) else step


def to_scalar(number: Any) -> Any:
    """A learning rate or beta as it is: capture has made a 0-dim tensor of it already."""
    return number


def radam(*lists: Any, capturable: bool, **kwargs: Any) -> None:
    """RAdam asks the step count whether to rectify; its capturable form selects instead."""
    steps = [step.to(torch.float64) for step in lists[4]]
    compat.single_tensor_radam(*lists[:4], steps, capturable=True, **kwargs)
    for step, counted in zip(lists[4], steps):
        step.copy_(counted)


def asgd(*lists: Any, capturable: bool, **kwargs: Any) -> None:
    """ASGD asks whether it averages yet; its capturable form averages with weight one. Its numbers (mu, eta, steps)
    are float32, and in eager Python's: 1 - lambd * eta is a rounding away from 1."""
    numbers = [[number.to(torch.float64) for number in of_each] for of_each in lists[3:6]]
    compat.single_tensor_asgd(*lists[:3], *numbers, capturable=True, **kwargs)
    for of_each, new in zip(lists[3:6], numbers):
        for number, value in zip(of_each, new):
            number.copy_(value)


CAPTURABLE = {radam: compat.single_tensor_radam, asgd: compat.single_tensor_asgd}


def adafactor(params: list, grads: list, row_vars: list, col_vars: list, variances: list,
              state_steps: list, grad_scale: Any, found_inf: Any, *, d: float, lr: Any,
              beta2_decay: float, weight_decay: float, eps1: float | None, eps2: float,
              maximize: bool, has_complex: bool) -> None:
    """`_single_tensor_adafactor` with its numbers in float64 tensors instead of Python floats."""
    assert grad_scale is None and found_inf is None
    for param, grad, row, column, variance, step in zip(
            params, grads, row_vars, col_vars, variances, state_steps):
        grad = -grad if maximize else grad
        tiny = torch.finfo(param.dtype).eps if eps1 is None else eps1
        step += 1
        count = step.to(torch.float64)
        weight = (count**beta2_decay).to(param.dtype)
        rate = (1 / count**0.5).clamp(max=lr)
        scale = (param.norm(2).to(torch.float64) / param.numel()**0.5).clamp(min=eps2) * rate
        if weight_decay != 0:
            param.mul_(1 - lr * weight_decay)
        if grad.dim() > 1:
            row.lerp_(torch.norm(grad, dim=-1, keepdim=True).square_().div_(grad.size(-1)), weight)
            column.lerp_(torch.norm(grad, dim=-2, keepdim=True).square_().div_(grad.size(-2)), weight)
            estimate = (row @ column).div_(row.mean(dim=-2, keepdim=True).clamp_(min=tiny))
        else:
            variance.lerp_(grad * grad, weight)
            estimate = variance.clone()
        update = estimate.clamp_(min=tiny * tiny).rsqrt_().mul_(grad)
        norm = update.norm(2).to(torch.float64) / (update.numel()**0.5 * d)
        param.add_(update.mul_(-scale / norm.clamp(min=1.0)))


# Updates of large parameters may be operators, for a pass has these write in place. Inductor's loops are faster.
FOR_THE_EAGER_LOWERING: dict[Any, Callable] = {one_operator.copies_are_removed: lambda: True}


def single_tensor_forms() -> dict[Any, Callable]:
    """`foreach` and fused updates need every gradient at once: trace the loop over tensors."""
    forms: dict[Any, Callable] = {
        compat.single_tensor_asgd: asgd, compat.single_tensor_radam: radam,
        compat.single_tensor_adafactor: adafactor}
    for name in ("adadelta", "adagrad", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop",
                 "rprop", "sgd", "_adafactor", "_muon"):
        module = sys.modules.get(f"torch.optim.{name}")
        single = getattr(module, f"_single_tensor_{name.lstrip('_')}", None)
        for prefix in ("_multi_tensor_", "_fused_"):
            other = getattr(module, prefix + name.lstrip("_"), None)
            if single is not None and other is not None:
                forms[compat.undisabled(other)] = forms[other] = forms.get(single, single)
        for name, form in (("_get_value", get_value), ("_to_scalar", to_scalar)):
            if hasattr(module, name):
                forms[getattr(module, name)] = form
    return forms


def is_loop(function: Any) -> bool:
    """Whether it is the update of parameters one by one."""
    ours = function in (radam, asgd, adafactor)
    return ours or function.__module__.startswith("torch.optim.") and function.__name__.startswith("_single_tensor_")


def own_step(optimizer: torch.optim.Optimizer) -> Callable:
    """The class's `step` without torch's hook, grad-mode and graph-break wrappers."""
    step = compat.undisabled(type(optimizer).step)
    wrappers = {"profile_hook_step.<locals>.wrapper", "_use_grad_for_differentiable.<locals>._use_grad",
                "context_decorator.<locals>.decorate_context",
                "Optimizer.profile_hook_step.<locals>.wrapper"}
    while getattr(step, "__qualname__", "") and step.__code__.co_qualname in wrappers:
        step = step.__wrapped__
    return step


def refuse(optimizer: torch.optim.Optimizer) -> None:
    """End the graph at an update that cannot be captured."""
    if guards.has_step_of_its_own(optimizer):
        breaks.break_graph("a step() that was put on the optimizer itself", "capture traces that of its class",
                           "write it as a method of a class derived from the optimizer's")
    if isinstance(optimizer, torch.optim.LBFGS) or optimizer.defaults.get("differentiable"):
        breaks.break_graph(
            f"{type(optimizer).__name__}.step cannot be captured",
            "its update runs backward passes or is itself differentiated",
            "use a first-order optimizer with differentiable=False to save memory here",
        )
    if any(p.layout is not torch.strided for group in optimizer.param_groups for p in group["params"]):
        breaks.break_graph("a parameter of the optimizer is sparse", "torch.compile traces no sparse tensors",
                           "make it dense to save memory here")
    if compat.global_optimizer_hooks():
        breaks.break_graph("global optimizer hooks", "they are not part of the step",
                           "register the hook on the optimizer itself")


def is_update(frame: Any) -> bool:
    """Whether a frame is part of an optimizer's update: code of `torch.optim`, or its own `step`."""
    first = next(iter(frame.f_locals.values()), None)
    if isinstance(first, torch.optim.Optimizer) and frame.f_code is own_step(first).__code__:
        return True
    return (frame.f_code.co_filename.startswith(os.path.dirname(torch.optim.__file__))
            and not isinstance(first, torch.nn.Module))  # an `AveragedModel` is a model


def cycles_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scheduler of torch's moves its momentum: CyclicLR and OneCycleLR leave their bounds in the groups."""
    return any("max_momentum" in group for group in optimizer.param_groups)


def make_state(optimizer: torch.optim.Optimizer, tx: Any) -> None:
    """Make the state of parameters that have a gradient here and none yet, as eager would.

    State made inside the trace would be a first graph of its own; made here, the first call
    and the thousandth run the same graph. A method of this name that is neither torch's nor ours may keep the
    gradient, or write to the group: that is traced.
    """
    init = compat.undisabled(getattr(type(optimizer), "_init_group", None))
    if not getattr(init, "__module__", "").startswith(("torch.optim.", "memopt_compile.")):
        return
    lists = len(inspect.signature(init).parameters) - 2
    for group in optimizer.param_groups:
        new = [p for p in group["params"]
               if not optimizer.state.get(p) and compat.pending_gradient(tx, p)]
        if not new:
            continue
        gradients = [p.grad for p in new]
        try:
            for p in new:
                p.grad = (torch.zeros((), dtype=p.dtype, device=p.device).expand_as(p)
                          if type(p) is torch.nn.Parameter else torch.zeros_like(p))
            init(optimizer, {**group, "params": new}, *([] for _ in range(lists)))
            if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and not group["dampening"]:
                # SGD's first step copies the gradient: with a zero buffer 0·momentum + g is g.
                for p in new:
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        finally:
            for p, old in zip(new, gradients):
                p.grad = old
