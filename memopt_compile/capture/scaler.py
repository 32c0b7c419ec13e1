"""A `torch.amp.GradScaler` in a trace: an update that eager would leave out is computed, and not taken.

Eager reads off the gradients whether one of them is inf or NaN, and calls ``optimizer.step()`` if none is. A graph cannot
ask. It runs the update, and each parameter and state that it may write to has its old value again where one was:

    finite = all(|g| finite for g in gradients)        unscale_: g *= 1 / scale
    old = clone(p); step writes p; p.copy_(where(finite, p, old))
    scale, tracker = where(finite, ...)                update: growth_factor, backoff_factor, growth_interval

Rules:

1. Methods take the place of those of the same names in `torch.amp.grad_scaler`, whose file Dynamo does not enter. What they
   keep in the scaler is what those keep, so that a part of the loop may be outside of the step.
2. The scale is made before the trace, as states are: made in it, the first call's graph would be another than the second's.
3. An update that changes anything else than parameters that have a gradient, and their states, ends the graph: numbers of Python's
   (``self.steps += 1``), gradients that it frees, a moving average kept by a hook.

4. Ranks that share parameters leave the update out together: they look for the largest element of all gradients.

Memory: an old value lives while its tensor is updated. Numerics: eager's operators; a fused update divides by the scale, others
multiply by its inverse.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from .. import compat
from ..compat import breaks, dynamo, effects

MODULE = OptState.__module__


class Scaler:
    """The methods of a `GradScaler`, enabled or not."""

    def scale(self: Any, outputs: Any) -> Any:
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            return outputs * self._scale.to(device=outputs.device)
        return type(outputs)([self.scale(each) for each in outputs])

    def unscale_(self: Any, optimizer: Any, divide: bool = False) -> None:
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        state = state_of(self, optimizer)
        if state["stage"] is not OptState.READY:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update(), or step()")
        inverse = self._scale.double().reciprocal().float()
        with torch.no_grad():
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"]
                         if p.grad is not None and p.grad.numel()]
            if any(g.dtype is torch.float16 for g in gradients):
                raise ValueError("Attempting to unscale FP16 gradients.")
            if gradients:
                # No mask as large as a gradient; of rows that ranks share it is that of all.
                largest = torch.nn.utils.get_total_norm(gradients, float("inf"))
                largest = largest if type(largest) is Tensor else largest.full_tensor()
                state["found_inf_per_device"] = {self._scale.device: (~largest.isfinite()).float()}
            for g in gradients:
                g.div_(self._scale) if divide else g.mul_(inverse)
        state["stage"] = OptState.UNSCALED

    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        self._check_scale_growth_tracker("step")
        update = optimizer.step  # has the optimizer's state made
        state = state_of(self, optimizer)
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer, getattr(optimizer, "_step_supports_amp_scaling", False))  # a fused update does it
        if not state["found_inf_per_device"]:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        found = sum(state["found_inf_per_device"].values())
        with torch.no_grad():
            written = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            written += [value for p in written for value in optimizer.state.get(p, {}).values() if isinstance(value, Tensor)]
            old = [value.clone() for value in written]
            update_of(update, written, *args, **kwargs)
            for value, before in zip(written, old):
                value.copy_(torch.where(found == 0, value, before))
        state["stage"] = OptState.STEPPED

    def update(self: Any, new_scale: Any = None) -> None:
        if not self._enabled:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        with torch.no_grad():
            if isinstance(new_scale, Tensor):
                scale.copy_(new_scale)
            elif new_scale is not None:
                scale.fill_(new_scale)
            else:
                found = sum([found for state in self._per_optimizer_states.values()
                             for found in state["found_inf_per_device"].values()])
                if not isinstance(found, Tensor):
                    raise AssertionError("No inf checks were recorded prior to update.")
                good = tracker + 1
                grown = (scale.double() * self._growth_factor).float()
                grown = torch.where((good == self._growth_interval) & grown.isfinite(), grown, scale)
                scale.copy_(torch.where(found == 0, grown, (scale.double() * self._backoff_factor).float()))
                tracker.copy_(torch.where((found == 0) & (good != self._growth_interval), good, 0))
        self._per_optimizer_states.clear()

    def _check_scale_growth_tracker(self: Any, funcname: str) -> Any:
        if self._scale is None:
            raise AssertionError(f"Attempted {funcname} but _scale is None. Use scaler.scale(loss) earlier.")
        return self._scale, self._growth_tracker

    def is_enabled(self: Any) -> bool:
        return self._enabled

    def get_scale(self: Any) -> float:
        return self._scale.item() if self._enabled else 1.0


def state_of(scaler: Any, optimizer: Any) -> dict[str, Any]:
    """What the scaler keeps of an optimizer till the next `update`. (Dynamo reads a constant off its empty defaultdict.)"""
    return scaler._per_optimizer_states.setdefault(
        id(optimizer), {"stage": OptState.READY, "found_inf_per_device": {}})


def update_of(update: Any, written: list[Tensor], *args: Any, **kwargs: Any) -> None:
    """Calls `update`, which may change nothing but `written`."""
    update(*args, **kwargs)


def check(tx: Any, written: Any) -> Callable[[torch.optim.Optimizer, Any], None]:
    """Ends the graph behind an update, of this optimizer and with this result, that changes more than is `written`."""
    changed = effects.watch(tx)

    def refuse_more(optimizer: torch.optim.Optimizer, result: Any) -> None:
        more = changed(dynamo.tensors_in(written)) or ("" if dynamo.is_none(result) else "what it returns")
        if more == effects.HELD and _states(optimizer) < sum(len(group["params"]) for group in optimizer.param_groups):
            _unmade(tx).append((weakref.ref(optimizer), _states(optimizer)))
            breaks.break_graph("a GradScaler may leave out the optimizer's step, whose first one makes its states",
                               "those behind it are captured", "call the step once before it is compiled, to have them made")
        if more:
            breaks.break_graph(
                "a GradScaler may leave out the optimizer's step, which changes more than parameters and their states",
                more, "train in bfloat16 without one, or have that done outside of the optimizer's step")

    return refuse_more


def _states(optimizer: torch.optim.Optimizer | None) -> int:
    return sum(bool(state) for state in optimizer.state.values()) if optimizer is not None else 0


def _unmade(tx: Any) -> list[tuple[weakref.ref, int]]:
    """Optimizers that have yet to make states, and how many they have: noted for the trace that begins anew."""
    return vars(tx.speculation_log).setdefault("memopt_unmade", [])


def call(tx: Any, function: Any, owner: Any, args: Any, kwargs: Any) -> Any:
    """A function of `torch.amp.grad_scaler` in a trace, None for one that is not traced."""
    form = vars(Scaler).get(function.__name__)
    if form is None or owner is None:
        return None
    scaler = compat.object_behind(owner)
    if function.__name__ == "scale" and scaler.is_enabled() and scaler._scale is None:
        tensors = dynamo.tensors_in(args[0])
        if tensors:
            scaler._lazy_init_scale_growth_tracker(compat.fake_value(tensors[0]).device)
    for optimizer, known in _unmade(tx):  # the step is traced again as soon as these have more
        compat.guard_value(owner.source, lambda _, of=optimizer, known=known: _states(of()) == known, "an optimizer makes states")
    if function.__name__ == "step" and scaler.is_enabled():
        optimizer = compat.object_behind(args[0])
        if getattr(optimizer, "_step_supports_amp_scaling", False) and not type(optimizer).__module__.startswith("torch.optim"):
            breaks.break_graph("the optimizer unscales its gradients itself", "a GradScaler hands itself to its step",
                               "train in bfloat16 without one")
    return compat.UserMethodVariable(form, owner).call_function(tx, args, kwargs)
