"""Gradients of micro-batches that add up in 8 bits: line 5 of LPMM's Algorithm 1.

    g ← Q(∇f) of the first micro-batch        g ← Q(g + ∇f) of each further one

Q is the linear format of 8 bits, in groups of the parameter's size and with its rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Optimizer, Options
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

    def _add(self, p: Tensor, grad: Tensor, group: Options) -> None:
        state, formats = self.state[p], self.formats(p, group)
        first = not state.get("folded", False)
        state["folded"] = True
        if DRAWS in state:
            state[DRAWS].add_(1)
        p, grad = self.in_blocks(group, p, grad)
        for slab in self.slabs(p, group):
            total = cut(grad, slab)
            if not first:
                total = total + read(state, GRADIENT, p, slab, formats)
            write(state, GRADIENT, total, p, slab, formats)

    def _step(self) -> None:
        self.accumulate()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p, {})
                if state.get("folded", False):
                    del state["folded"]
                    grad = read(state, GRADIENT, p, None, self.formats(p, group))
                    self._guarded(p, grad, state, group)
                elif p.grad is not None:
                    self._guarded(p, p.grad, state, group)
