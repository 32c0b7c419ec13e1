"""Gradients of micro-batches that add up in 8 bits: line 5 of LPMM's Algorithm 1.

    g ← Q(∇f) of the first micro-batch        g ← Q(g + ∇f) of each further one

Q is the linear format of 8 bits, in groups of the parameter's size and with its rounding.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..quantization.parameters import LowPrecisionTensor
from . import one_operator
from .accumulation import Handles
from .base import Optimizer, Options, State
from .low_bit import DRAWS, GRADIENT, read, write
from .slabs import cut


class LowPrecisionGradients(Optimizer):
    """An optimizer that with ``gradient_bits=8`` keeps the gradients of low-precision parameters in
    its own state `gradient` between micro-batches:

    >>> for x, y in memopt.micro_batches(n, inputs, targets):
    ...     loss(x, y).backward()
    ...     opt.accumulate()
    >>> opt.step()

    `step` takes in what gradients there are first: the last micro-batch needs no call, and without
    any the update is by Q(∇f). Other parameters' gradients add up in `.grad`, as always. Between
    `accumulate` and `step` the state has `folded`, as that of `Accumulating`.
    """

    keeps_gradients = True

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add each gradient to the sum so far, and free it."""
        self._init_groups()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and GRADIENT in self.state[p]:
                    grad, p.grad = p.grad, None
                    self._add(p, grad, group)

    def accumulate_in_backward(self) -> Handles:
        """From now on add each gradient to the sum as soon as a backward has finished it.

        An ordinary loop, ``backward()`` for each micro-batch and then ``step()``, so adds up in 8 bits, and
        holds one layer's gradient at a time in full precision. What is between them sees no gradients: use
        `max_norm` to clip. For eager use, as that of `Accumulating`.
        """
        return Handles([p.register_post_accumulate_grad_hook(partial(self._hook, index))
                        for index, group in enumerate(self.param_groups) for p in group["params"]
                        if isinstance(self.shards.local(p), LowPrecisionTensor) and group["gradient_bits"] != 32])

    @torch.no_grad()
    def _hook(self, index: int, p: Tensor) -> None:
        group = self.param_groups[index]  # looked up now: a loaded checkpoint brings new groups
        self._init_group({**group, "params": [p]})
        grad, p.grad = p.grad, None
        self._add(p, grad, group)

    def _add(self, p: Tensor, grad: Tensor, group: Options) -> None:
        state = self.state[p]
        group = {**group, "first": not state.get("folded", False)}
        state["folded"] = True
        p, grad = self.shards.local(p), self.shards.local(grad)
        if one_operator.applies(self, p, group):
            one_operator.apply(self, one_operator.ADD, p, grad, state, group,
                               changes=[GRADIENT, f"{GRADIENT}_scale", DRAWS], moves=False)
        else:
            self._add_in_slabs(p, grad, state, group)

    def _add_in_slabs(self, p: Tensor, grad: Tensor, state: State, group: Options) -> None:
        formats = self.formats(p, group)
        if DRAWS in state:
            state[DRAWS].add_(1)
        p, grad = self.in_blocks(group, p, grad)
        for slab in self.slabs(p, group):
            total = cut(grad, slab)
            if not group["first"]:
                total = total + read(state, GRADIENT, p, slab, formats)
            write(state, GRADIENT, total, p, slab, formats)

    def _step(self) -> None:
        self.accumulate()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p, {})
                if state.get("folded", False):
                    del state["folded"]
                    self._guarded(p, self._kept(p, state, group), state, group)
                elif p.grad is not None:
                    self._guarded(p, p.grad, state, group)

    def _kept(self, p: Tensor, state: State, group: Options) -> Tensor | None:
        """The sum: None where an operator that has the state reads it there, a slab at a time."""
        whole = group["skip_nonfinite"] or group["max_norm"] is not None
        p = self.shards.local(p)
        if one_operator.applies(self, p, group) and not whole:
            return None
        return read(state, GRADIENT, p, None, self.formats(p, group))

    def _update_in_slabs(self, p: Tensor, grad: Tensor | None, state: State, group: Options) -> None:
        if grad is None:
            grad = LowPrecisionTensor([state[GRADIENT], state[f"{GRADIENT}_scale"], state[GRADIENT]],
                                      self.formats(p, group)[GRADIENT], p.shape, p.dtype)
        super()._update_in_slabs(p, grad, state, group)
