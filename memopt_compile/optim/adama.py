"""AdamA: Adam Accumulation, Algorithm 2.

    first micro-batch:  m ← β₁m, v ← β₂v
    each micro-batch:   m ← m + (1−β₁)g, v ← v + s·(1−β₂)g², and g is freed
    step:               θ ← θ − lr · m/(1−β₁ᵗ) / (√(v/(1−β₂ᵗ)) + ε)

The gradient g of a micro-batch is 1/N of its mean: divide its loss by N. With one micro-batch
this is Adam. With N, m is Adam's, and v holds the sum of the squares where Adam has the square of
the sum; that is up to N times smaller, the more so the better the gradients agree. s = `v_scale`
makes up for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .adam import Adam, AdamW
from .base import Options, State, finite
from .slabs import cut


class AdamA(AdamW):
    """Adam that takes the gradients of a mini-batch in parts and keeps none of them.

    >>> for x, y in memopt.micro_batches(n, inputs, targets):
    ...     (loss(x, y) / n).backward()
    ...     opt.accumulate()
    >>> opt.step()

    `step` first folds what gradients there are: without `accumulate` it is Adam, and the
    gradients of the last micro-batch need no call. They are gone after it, so there is nothing to
    zero. A parameter that got no gradient in a mini-batch is left alone.

    Args:
        params, lr, betas, eps, amsgrad, options: as in `Adam`. With `skip_nonfinite` the
            micro-batch is skipped, for the parameters concerned; such a step is not captured
            whole.
        weight_decay: λ, decoupled as in `AdamW`. Added to the gradient it would have to know N.
        v_scale: s, from 1, the published sum of squares, to the number of micro-batches N, which
            is Adam's v where all micro-batches have the same gradient.

    State of a parameter: as of `Adam`, and between `accumulate` and `step` also `folded`, True
    where a micro-batch is in it. Checkpoints go to and from `torch.optim.AdamW`.

    Raises:
        OptimizerError: a setting is out of its range, or asks for weight decay that is not
            decoupled.
    """

    state_names = Adam.state_names | {"folded"}

    def __init__(self, params: Iterable, lr: float | Tensor = 1e-3,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, amsgrad: bool = False, *, v_scale: float = 1.0,
                 **options: Any) -> None:
        super(Adam, self).__init__(
            params, options, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
            amsgrad=amsgrad, decoupled_weight_decay=True, v_scale=v_scale)

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        self.check_at_least(group, "v_scale", 1)
        if group["weight_decay"] != 0 and not group["decoupled_weight_decay"]:
            raise self.error("weight decay added to gradients cannot be accumulated",
                             "use decoupled weight decay, as AdamW does")

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
        hooks = [p.register_post_accumulate_grad_hook(partial(self._hook, index))
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
        if group["skip_nonfinite"] and not finite(grad):
            return
        state = self.state[p]
        first = not state.get("folded", False)
        if first:
            state["step"].add_(1)
        state["folded"] = True  # no count: capture traces a loop once whose rounds are alike
        self.in_slabs(p, state, group, lambda slab, part: self.fold(
            self.gradient(grad, slab, group), part, group, first))

    def _step(self) -> None:
        """Finish the mini-batch: fold what gradients are left, then move the parameters."""
        self.accumulate()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p, {})
                if state.pop("folded", False):
                    self._finish(p, state, group)

    def _finish(self, p: Tensor, state: State, group: Options) -> None:
        """The update of `p` from its moments."""
        self.in_slabs(p, state, group, lambda slab, part: self.apply(cut(p, slab), part, group))


class Handles:
    """The handles of several hooks as one."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self.handles = handles

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
