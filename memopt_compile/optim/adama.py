"""AdamA: Adam Accumulation, Algorithm 2.

    first micro-batch:  m ← β₁m, v ← β₂v
    each micro-batch:   m ← m + (1−β₁)g, v ← v + s·(1−β₂)g², and g is freed
    step:               θ ← θ − lr · m/(1−β₁ᵗ) / (√(v/(1−β₂ᵗ)) + ε)

The gradient g of a micro-batch is 1/N of its mean: divide its loss by N. With one micro-batch
this is Adam. With N, m is Adam's, and v holds the sum of the squares where Adam has the square of
the sum; that is up to N times smaller, the more so the better the gradients agree. Two settings
make up for it, neither of them published. s = `v_scale` is one factor for all elements. With
`micro_batches` = N, each step adds what the sum of squares lacks where gradients agree,

    v ← v + (1−β₂)(1−1/N)·m̂²,   m̂ = m/(1−β₁ᵗ).

For if micro-batches have mean μ and variance σ², Adam takes μ² + σ²/N and AdamA (μ² + σ²)/N: the
difference is (1−1/N)μ², and m̂ is the estimate of μ that is at hand.
On M ranks the states are summed up before the step: see `data_parallel`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from . import data_parallel
from .accumulation import Accumulating
from .adam import Adam, AdamW
from .base import Options, State


class AdamA(Accumulating, AdamW):
    """Adam that takes the gradients of a mini-batch in parts and keeps none of them.

    See `Accumulating`. Without `accumulate` it is Adam. All gradients are gone after `step`, so there
    is nothing to zero.

    Args:
        params, lr, betas, eps, amsgrad, options: as in `Adam`.
        weight_decay: λ, decoupled as in `AdamW`. Added to the gradient it would have to know N.
        v_scale: s, from 1, the published sum of squares, to the number of micro-batches, N or on
            M ranks N·M, which is Adam's v where all micro-batches have the same gradient.
        micro_batches: the same number, to have v estimate Adam's; 1 is the published algorithm.
        max_norm: of what one micro-batch adds to a parameter's gradient, ∇f/N or on M ranks
            ∇f/(N·M); clipped before it is folded.
        process_group: of `torch.distributed`, whose ranks train one model on different data. Each
            divides its losses by its own number of micro-batches N; `step` and the constructor
            are then calls that all ranks make. A parameter without a gradient on some ranks has
            one of zeros there.

    State of a parameter: as of `Adam`. Checkpoints go to and from `torch.optim.AdamW`.

    Raises:
        OptimizerError: a setting is out of its range, or asks for weight decay that is not
            decoupled; or the ranks differ in parameters or settings.
    """

    frees_gradients = True
    state_names = Adam.state_names | {"folded"}
    process_group: Any = None

    def __init__(self, params: Iterable, lr: float | Tensor = 1e-3,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, amsgrad: bool = False, *, v_scale: float = 1.0,
                 micro_batches: int = 1, process_group: Any = None, **options: Any) -> None:
        super(Adam, self).__init__(
            params, options, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
            amsgrad=amsgrad, decoupled_weight_decay=True, v_scale=v_scale,
            micro_batches=micro_batches)
        if process_group is not None:
            self.ranks = data_parallel.size(self, process_group)
            self.process_group = process_group
            data_parallel.check_alike(self, self.param_groups)

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        self.check_at_least(group, "v_scale", 1)
        if group["v_scale"] > group["micro_batches"] > 1:  # told of none, N is not known
            raise self.error(f"v_scale is {group['v_scale']}, and there are {group['micro_batches']} micro-batches",
                             "choose v_scale of at most their number, where they all have one gradient")

    def _step(self) -> None:
        """Finish the mini-batch: fold what gradients are left, then move the parameters."""
        self.refuse_scaler()
        if self.ranks > 1:
            self.accumulate()
            data_parallel.reduce_states(self)
        super()._step()

    def fold(self, grad: Tensor, state: State, group: Options, first: bool) -> None:
        if first and self.ranks > 1:  # Mβ₂v of which each rank's sum gets 1/M², M times
            state["exp_avg_sq"].mul_(self.ranks)
        super().fold(grad, state, group, first)

    def apply(self, p: Tensor, state: State, group: Options) -> None:
        if group["micro_batches"] > 1:
            (beta1, beta2), m = group["betas"], state["exp_avg"]
            missing = (1 - beta2) * (1 - 1 / group["micro_batches"])
            state["exp_avg_sq"].addcmul_(m, m, value=missing / (1 - beta1**self.count(state))**2)
        super().apply(p, state, group)

    # ------------------------------------------------------------------ on several ranks

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self.ranks > 1:
            data_parallel.check_alike(self, self.param_groups[-1:])

    def state_dict(self) -> dict[str, Any]:
        """As of `Optimizer`; on several ranks only between mini-batches, when all have the same."""
        if self.ranks > 1 and any("folded" in state for state in self.state.values()):
            raise self.error("within a mini-batch the state is a part of this rank alone",
                             "save it behind step(), before the next backward()")
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        if self.ranks > 1:
            raise self.error("a process group cannot be copied or pickled with its optimizer",
                             "make a new AdamA with the group, and load this one's state_dict()")
        return super().__getstate__()

