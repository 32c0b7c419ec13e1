"""Optimizers that take the gradients of a mini-batch in parts, and keep none of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from . import one_operator
from .base import Optimizer, Options, State


class Accumulating(Optimizer):
    """An optimizer whose update is a sequence of two, so that the first can come in parts:

    - ``fold(grad, state, group, first)``: take a gradient into the state of its parameter, `first`
      if it is the first of the mini-batch. An `elementwise` one gets slabs of both, and a gradient
      to descend along; another gets the whole, and takes `gradient` of it.
    - ``apply(p, state, group)``: move the parameter by its state, a slab of each or the whole.

    >>> for x, y in memopt.micro_batches(n, inputs, targets):
    ...     (loss(x, y) / n).backward()
    ...     opt.accumulate()
    >>> opt.step()

    `step` first folds what gradients there are, and frees them: the last micro-batch needs no call. Between
    `accumulate` and `step` a parameter's state has `folded`, True where a micro-batch is in it. A
    parameter that got no gradient in a mini-batch is left alone. With `skip_nonfinite` a
    micro-batch is skipped, for the parameters concerned; such a step is not captured whole.

    A `torch.amp.GradScaler` unscales the gradients that are there when it takes the step: not those that
    were folded, scaled, before. Its `step` is refused where any were.
    """

    keeps_gradients = False
    frees_gradients = False  # of a step without `accumulate` too, where others leave them to `zero_grad`
    ranks = 1  # processes that share a mini-batch
    found_inf: Any = None
    """Set by a `GradScaler` while it has the optimizer step, if the property below says so."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by `GradScaler.step`. Within a mini-batch it then leaves gradients as they are and shows itself
        to `step`, also where no gradient is left or the last is not finite; else it unscales all there is."""
        return any("folded" in state for state in self.state.values())

    def check(self, group: Options) -> None:
        super().check(group)
        n = group.get("micro_batches", 1)
        if not (n >= 1 and n % 1 == 0):
            raise self.error(f"micro_batches is {n}", "choose a whole number of at least 1")

    def refuse_scaler(self) -> None:
        """For `_step`, before it changes anything."""
        if self.found_inf is None:
            return
        del self.found_inf, self.grad_scale  # the scaler does not, if its optimizer raises
        raise self.error("a GradScaler steps it behind accumulate(): it folded scaled gradients into the states",
                         "behind each backward() call scaler.unscale_(opt), opt.accumulate() and scaler.update(), "
                         "and opt.step() at the end, with skip_nonfinite=True; and load a checkpoint: these states "
                         "are wrong")

    @torch.no_grad()
    def accumulate(self) -> None:
        """Fold every gradient into its parameter's state, and free it."""
        self._init_groups()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._fold_and_free(p, p.grad, group)

    def accumulate_in_backward(self) -> Handles:
        """From now on fold each gradient as soon as a backward has finished it.

        No more than the gradients of one layer are alive then. For eager use: a step whose
        parameters have hooks is not captured whole. Call it once, after the last parameter group
        was added; ``remove()`` of the handle ends it.
        """
        hook = torch.compiler.disable(self._hook)  # Dynamo would compile it for each parameter by itself
        hooks = [p.register_post_accumulate_grad_hook(partial(hook, index))
                 for index, group in enumerate(self.param_groups) for p in group["params"]
                 if p.requires_grad]
        return Handles(hooks)

    def _hook(self, index: int, p: Tensor) -> None:
        group = self.param_groups[index]  # looked up now: a loaded checkpoint brings new groups
        if p.grad is not None:
            with torch.no_grad():
                self._init_group({**group, "params": [p]})
                self._fold_and_free(p, p.grad, group)

    def _fold_and_free(self, p: Tensor, grad: Tensor, group: Options) -> None:
        p.grad = None
        if group["skip_nonfinite"] and not self.finite(grad, p):
            return
        if group["max_norm"] is not None:
            grad = self.clip(grad, p, group["max_norm"] * self.ranks)
        state = self.state[p]
        first = not state.get("folded", False)
        if first and "step" in state:
            state["step"].add_(1)
        state["folded"] = True  # no count: capture traces a loop once whose rounds are alike
        here = self.shards.local(p)
        if one_operator.applies(self, here, group):
            one_operator.apply(self, "_fold_in_slabs", here, self.shards.local(grad), state,
                               {**group, "first": first}, moves=False)
        elif self.elementwise:
            self._fold_in_slabs(p, grad, state, {**group, "first": first})
        else:
            self.fold(grad, state, group, first)

    def _fold_in_slabs(self, p: Tensor, grad: Tensor, state: State, group: Options) -> None:
        p, grad = self.in_blocks(group, self.shards.local(p), self.shards.local(grad))
        self.in_slabs(p, state, group, lambda slab, part: self.fold(
            self.gradient(grad, slab, group), part, group, group["first"]))

    def update(self, p: Tensor, grad: Tensor, state: State, group: Options) -> None:
        self.fold(grad, state, group, first=True)
        self.apply(p, state, group)

    def _step(self) -> None:
        """Finish the mini-batch: fold what gradients are left, then move the parameters."""
        self.refuse_scaler()
        # Of a mini-batch in parts none may stay, or the next one would fold it once more.
        frees = self.frees_gradients or any("folded" in state for state in self.state.values())
        self._init_groups()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p, {})
                if not state.get("folded", False):
                    if (grad := p.grad) is not None:
                        if frees:
                            p.grad = None
                        self._guarded(p, grad, state, group)
                    continue
                if p.grad is not None:
                    self._fold_and_free(p, p.grad, group)
                del state["folded"]
                here = self.shards.local(p)
                if one_operator.applies(self, here, group):
                    one_operator.apply(self, "_apply_in_slabs", here, None, state, group)
                elif self.elementwise:
                    self._apply_in_slabs(p, None, state, group)
                else:
                    self.apply(p, state, group)

    def _apply_in_slabs(self, p: Tensor, grad: None, state: State, group: Options) -> None:
        p, = self.in_blocks(group, self.shards.local(p))
        self.in_slabs(p, state, group, lambda slab, part: self.move(
            p, state, slab, group, lambda weight: self.apply(weight, part, group)))


class Handles:
    """The handles of several hooks as one."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self.handles = handles

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
