"""Adam's moments as capture leaves them for the AdamA pass: sums into which gradients are folded.

With ``accumulate="optimizer_states"`` and several micro-batches a step, the update of Adam and
AdamW is traced in the form of `adam`, in which ``memopt::fold`` stands where the accumulated
gradient enters a moment, and ``memopt::clip`` where `max_norm` clips it.
`passes.accumulate_in_states` puts there what the option asks for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import OptionError
from .optim import Adam
from .optim.accumulation import Accumulating


@torch.library.custom_op("memopt::fold", mutates_args=())
def fold(state: Tensor, gradient: Tensor, decay: Tensor, power: int) -> Tensor:
    """A moment with the gradient of a mini-batch: decay · state + (1 − decay) · gradientᵖᵒʷᵉʳ."""
    return decay * state + (1 - decay) * gradient**power


@torch.library.custom_op("memopt::clip", mutates_args=())
def clip(gradient: Tensor, limit: Tensor) -> Tensor:
    """The gradient of a mini-batch with a norm of at most `limit`, 0-dim."""
    return gradient * (limit / torch.linalg.vector_norm(gradient)).clamp(max=1.0)


fold.register_fake(lambda state, gradient, decay, power: torch.empty_like(state))
clip.register_fake(lambda gradient, limit: torch.empty_like(gradient))


def refusal(optimizer: torch.optim.Optimizer) -> OptionError | None:
    """Why `optimizer` cannot accumulate in its states, or None.

    Weight decay that is added to the gradient would enter v once for the mini-batch, with the
    sum of its gradients, which are then never together.
    """
    kind = type(optimizer).__name__
    if isinstance(optimizer, Accumulating):
        return _error(f"{kind} accumulates by itself",
                      "call opt.accumulate() behind each backward(), and leave the option out")
    if not isinstance(optimizer, torch.optim.Adam | Adam):  # AdamW is one
        return _error(f"{kind} does not accumulate in its states", "use Adam or AdamW, or leave "
                      "accumulate='gradients'")
    for group in optimizer.param_groups:
        if group["weight_decay"] != 0 and not group.get("decoupled_weight_decay", False):
            return _error(f"weight_decay={group['weight_decay']} of {kind} is added to the gradient",
                          "use AdamW, whose weight decay is decoupled, or weight_decay=0")
        if group.get("state_bits", 32) != 32:
            return _error(f"state_bits={group['state_bits']}: a state in few bits is written whole",
                          "use memopt.optim.AdamA, which does that for each micro-batch")
        if group.get("gradient_bits", 32) != 32:
            return _error(f"gradient_bits={group['gradient_bits']}: they are for gradients that are kept",
                          "leave gradient_bits out")
        if group.get("weight_bits") and any(p.dtype == torch.bfloat16 for p in group["params"]):
            return _error(f"weight_bits={group['weight_bits']}: gradients in bfloat16 are summed up "
                          "before they are widened", "use memopt.optim.AdamA, which takes each")
        if any(p.is_complex() for p in group["params"]):
            return _error("a parameter is complex", "train torch.view_as_real of it")
    return None


def _error(what: str, do: str) -> OptionError:
    return OptionError(what, where="accumulate='optimizer_states'", do=do)


def adam(params: list, grads: list, exp_avgs: list, exp_avg_sqs: list, max_exp_avg_sqs: list,
         state_steps: list, grad_scale: Any, found_inf: Any, *, amsgrad: bool, has_complex: bool,
         beta1: Any, beta2: Any, lr: Any, weight_decay: float, eps: float, maximize: bool,
         capturable: bool, differentiable: bool, decoupled_weight_decay: bool) -> None:
    """`_single_tensor_adam` with both moments folded."""
    assert grad_scale is None and found_inf is None
    for i, (param, grad, m, v, step) in enumerate(
            zip(params, grads, exp_avgs, exp_avg_sqs, state_steps)):
        step += 1
        count = step.to(torch.float64)
        if weight_decay != 0:
            param.mul_(1 - lr * weight_decay)
        for value, beta, power in ((m, beta1, 1), (v, beta2, 2)):
            rows = _rows(value)
            rows.copy_(torch.ops.memopt.fold(rows, _rows(grad), _number(beta), power))
        if amsgrad:
            v = max_exp_avg_sqs[i].copy_(torch.maximum(max_exp_avg_sqs[i], v))
        root = (v.sqrt() / (1 - beta2**count) ** 0.5).add_(eps)
        rate = lr / (1 - beta1**count)
        param.add_(m / root * (rate if maximize else -rate))


def moments(self: Adam, grad: Tensor, state: dict, group: dict, first: bool) -> None:
    """`memopt.optim.Adam.fold` with both moments folded."""
    for name, beta, power in zip(("exp_avg", "exp_avg_sq"), group["betas"], (1, 2)):
        state[name].copy_(torch.ops.memopt.fold(state[name], grad, _number(beta), power))


def clipped(grad: Tensor, limit: Any) -> Tensor:
    """`memopt.optim.base.clipped`, to be done to the gradient of each micro-batch."""
    return torch.ops.memopt.clip(grad, _number(limit))


def _rows(value: Tensor) -> Tensor:
    """What this rank has of a DTensor, which is not known to go through our operators."""
    return value if type(value) is Tensor else value.to_local()


def _number(beta: Any) -> Tensor:
    return beta if isinstance(beta, Tensor) else torch.full((), beta, dtype=torch.float64)


def check(opts: Any, kind: str, notes: Any) -> None:
    """Refuse the option in `opts` where what capture has noted of the frame does not go with it.

    Raises:
        OptionError: there is no optimizer, the step is not whole, or another option is in the way.
    """
    where = "accumulate='optimizer_states'"
    if opts.accumulate == "gradients":
        return
    if not notes.folds:
        raise OptionError("capture has not seen the option", where=where,
                          do="give options={...} to torch.compile itself, not to a wrapper of memopt")
    if opts.verify:
        raise OptionError("AdamA's v is not Adam's, so that the two cannot be compared",
                          where=f"verify=True, {where}", do="verify the step without accumulate")
    if kind == "model":
        raise OptionError(f"the states cannot take in gradients: {notes.reason}" if notes.reason else
                          "the compiled function has no optimizer in it", where=where,
                          do="compile the whole step (forward, backward() and opt.step()) so that it is captured in one "
                          "graph (what cuts one is in the log, as 'not captured whole'), or leave accumulate out")
