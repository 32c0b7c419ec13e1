"""Gradients of micro-batches that add up in 8 bits: line 5 of LPMM's Algorithm 1.

    g ← Q(∇f) of the first micro-batch        g ← Q(g + ∇f) of each further one

Q is the linear format of 8 bits, in groups of the parameter's size and with its rounding. The sum is in
the optimizer's state, filled by `accumulate`, or with `accumulate_in_backward` it is `.grad` itself, a
`LowPrecisionTensor`: autograd adds to it in place, which encodes (`one_operator`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..quantization.named import LINEAR
from ..quantization.operators import quantize
from ..quantization.parameters import LowPrecisionTensor, register
from . import one_operator
from .accumulation import Handles
from .base import Optimizer, Options, State
from .low_bit import DRAWS, GRADIENT, beside, compressed, precise, read, write
from .shards import WHOLE
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

    def accumulate(self) -> None:
        """Add each gradient to the sum so far, and free it."""
        if any(isinstance(p.grad, LowPrecisionTensor) for group in self.param_groups for p in group["params"]):
            raise self.error("accumulate() of gradients that accumulate_in_backward() keeps in .grad",
                             "leave accumulate() out, and call zero_grad() behind step()")
        self._accumulate()

    @torch.no_grad()
    def _accumulate(self) -> None:
        self._init_groups()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and GRADIENT in self.state.get(p, {}):
                    grad, p.grad = p.grad, None
                    self._add(p, grad, group)

    def accumulate_in_backward(self) -> Handles:
        """From now on keep `.grad` itself in 8 bits: each backward rounds what it has added to it.

        So an ordinary loop, ``backward()`` for each micro-batch and then ``step()``, adds up in 8 bits,
        and one layer's gradient at a time is in full precision; and what is between them, such as
        `torch.nn.utils.clip_grad_norm_`, sees the sum. A captured step does the same. ``zero_grad()`` is
        called as ever. Call it once, between mini-batches, after the last parameter group was added;
        ``remove()`` of the handle ends it. Parameters that are frozen then are left out.

        Raises:
            OptimizerError: several ranks share the parameters, or a sum has begun by `accumulate`.
        """
        if self.shards is not WHOLE:
            raise self.error("accumulate_in_backward of parameters that ranks share",
                             "call opt.accumulate() behind each backward()")
        found = [p for group in self.param_groups for p in group["params"] if p.requires_grad
                 and isinstance(p, LowPrecisionTensor) and group["gradient_bits"] != 32]
        if any(self.state.get(p, {}).get("folded", False) for p in found):
            raise self.error("accumulate_in_backward within a mini-batch", "call it behind opt.step()")
        hooks = [p.register_post_accumulate_grad_hook(round_gradient) for p in found]
        self._choose_sums()
        return Handles([*hooks, SimpleNamespace(remove=self._choose_sums)])

    def first_state(self, p: Tensor, group: Options) -> State:
        state = super().first_state(p, group)
        if rounds(p):
            state.pop(GRADIENT, None)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._choose_sums()

    def _choose_sums(self) -> None:
        """See that a state has a sum if `.grad` is in full precision, and only then."""
        for group in self.param_groups:
            for p in group["params"]:
                here, state = self.shards.local(p), self.state.get(p, {})
                form = self.formats(here, group).get(GRADIENT)
                if state and form is not None and rounds(p) and not state.get("folded", False):
                    for name in one_operator.KEPT:
                        state.pop(name, None)
                elif state and form is not None and GRADIENT not in state:
                    empty = torch.zeros_like(here, dtype=precise(here))
                    state.update(compressed({GRADIENT: empty}, {GRADIENT: form}))

    def _add(self, p: Tensor, grad: Tensor, group: Options) -> None:
        state = self.state[p]
        group = {**group, "first": not state.get("folded", False)}
        state["folded"] = True
        p, grad = self.shards.local(p), self.shards.local(grad)
        grad = grad.dequantize() if isinstance(grad, LowPrecisionTensor) else grad
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
        self._accumulate()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p, {})
                if state.get("folded", False):
                    del state["folded"]
                    self._guarded(p, self._kept(p, state, group), state, group)
                elif p.grad is not None:
                    low = isinstance(p.grad, LowPrecisionTensor) and _whole(group)
                    self._guarded(p, p.grad.dequantize() if low else p.grad, state, group)

    def _kept(self, p: Tensor, state: State, group: Options) -> Tensor | None:
        """The sum: None where an operator that has the state reads it there, a slab at a time."""
        p = self.shards.local(p)
        if one_operator.applies(self, p, group) and not _whole(group):
            return None
        return read(state, GRADIENT, p, None, self.formats(p, group))

    def _update_in_slabs(self, p: Tensor, grad: Tensor | None, state: State, group: Options) -> None:
        if grad is None:
            grad = LowPrecisionTensor([state[GRADIENT], state[f"{GRADIENT}_scale"], state[GRADIENT]],
                                      self.formats(p, group)[GRADIENT], p.shape, p.dtype)
        super()._update_in_slabs(p, grad, state, group)


def _whole(group: Options) -> bool:
    """Whether an update reads the whole gradient before it begins."""
    return group["skip_nonfinite"] or group["max_norm"] is not None


def round_gradient(p: Tensor) -> None:
    """The hook of `accumulate_in_backward`: of a first gradient, which autograd has made; to another it adds.
    Capture knows it, and traces this."""
    if p.grad is not None and not isinstance(p.grad, LowPrecisionTensor):
        with torch.no_grad():
            keep_in_8_bits(p)


def keep_in_8_bits(p: Tensor) -> None:
    p.grad = torch.ops.memopt.gradient_in_8_bits(p, p.grad)


def rounds(p: Tensor) -> bool:
    """Whether the gradient of a parameter is kept in 8 bits in `.grad`."""
    return round_gradient in (p._post_accumulate_grad_hooks or {}).values()


@torch.library.custom_op("memopt::gradient_in_8_bits", mutates_args=())
def gradient_in_8_bits(p: Tensor, grad: Tensor) -> Tensor:
    """A gradient as `p.grad` keeps it. What is traced is `_rounded`: `p` is in low precision."""
    raise NotImplementedError


def _rounded(func: Any, p: LowPrecisionTensor, grad: Tensor) -> LowPrecisionTensor:
    form = beside(GRADIENT, LINEAR[8], p)
    # Of 16 bits of the count: neighbouring steps begin far apart, and so the micro-batches of one do not
    # draw what those of the other do.
    draws = p.draws * 40503
    parts = quantize(grad, draws, form.map, form.bits, form.block, form.seed, form.first)
    return LowPrecisionTensor([*parts, draws], form, p.shape, p.dtype)


register(torch.ops.memopt.gradient_in_8_bits, _rounded)
