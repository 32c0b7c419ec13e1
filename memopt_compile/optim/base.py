"""What the optimizers share: everything but the arithmetic of one parameter.

A new one gives, in one short file, a constructor that names its settings and

- ``new_state(p, group)``: the state of parameter `p` before its first step, tensors by name;
- ``update(p, grad, state, group)``: one step of `p` from its gradient, all in place;
- ``check(group)``: a refusal of settings out of range;

or, where the algorithm can take a gradient in parts, in place of the update `fold` and `apply`,
whose sequence it is (see `accumulation`). Each parameter is updated by itself, so that its update
can stand beside its backward in a captured step, and each gradient can be freed there.

The step count is a tensor and no number is read from a tensor while a step is traced: nothing
that training changes makes a compiled step compile again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import OptimizerError
from ..quantization.parameters import LowPrecisionTensor
from ..quantization.rounding import LOW, Rounded
from . import one_operator
from .loading import checked, restore
from .low_bit import (
    CORRECTION,
    DRAWS,
    GRADIENT,
    SMALL,
    Formats,
    State,
    compressed,
    expanded,
    formats_of,
    precise,
    read,
    read_weight,
    vectors,
    write,
    write_weight,
)
from .settings import COMMON, FLAGS, check, check_common
from .shards import WHOLE, Whole
from .slabs import Slab, slabs

Options = Mapping[str, Any]

OF_WEIGHTS = 0x5A3C  # what a seed is changed by, so that weights and moments draw other numbers


class Optimizer(torch.optim.Optimizer):
    """Base of the optimizers of this package.

    Args:
        params: parameters, pairs of name and parameter, or groups, as in `torch.optim`.
        options: settings that all have.
            maximize: ascend instead of descend.
            skip_nonfinite: a parameter whose gradient holds NaN or Inf keeps value and state.
            max_norm: the largest Euclidean norm of one parameter's gradient; a longer one is
                scaled to it in place, as by `torch.nn.utils.clip_grad_norm_`. None: any.
            state_bits: 32, 16, 8, 4 or 1, for each element of a moment of the parameter's shape that
                has 4096 elements or more; 32 is the parameter's own type. 16 is bfloat16 rounded
                at random, for the moments that may be negative. 1 is a sign for these, and blocks' row
                and column means (`quantization.factored`). Fixed for a parameter once it has a state.
            weight_bits: for parameters in bfloat16; others stay as they are. None: arithmetic and
                rounding to the nearest in bfloat16, as torch's. 16, 24 and 32: arithmetic in float32,
                rounded at random to bfloat16, or to 24 bits, or kept as it is: of these the parameter
                has the upper 16 bits and the state `correction` the others. Full precision of states is
                then float32. Fixed as `state_bits`.
            gradient_bits: 32 or 8: see `LowPrecisionGradients`. Fixed as `state_bits`.
            rounding_seed: an integer that, with the step and the element, decides the rounding.
            foreach, fused, capturable, differentiable: refused if on.
        defaults: the algorithm's own settings. A group may have its own value of any.

    A parameter without a gradient is left alone, and its steps are not counted.

    Raises:
        OptimizerError: a setting out of range, a flag, a complex parameter or a sparse gradient.
    """

    flags: ClassVar[Mapping[str, Any]] = FLAGS
    elementwise: ClassVar[bool] = False
    """No element's update depends on another element: large tensors go slab by slab."""
    required: ClassVar[frozenset[str]]
    """Settings by which a checkpoint is known as one of this algorithm."""
    state_names: ClassVar[frozenset[str]]
    """Every name that the state of a parameter may have."""
    keeps_gradients: ClassVar[bool] = False
    """It takes `gradient_bits`."""
    moments: ClassVar[Mapping[str, bool]] = {}
    """The states that `state_bits` is for, and whether they may be negative."""
    shards: Whole = WHOLE
    """What `memopt.shard_` has made of the parameters."""

    def __init__(self, params: Iterable, options: Mapping[str, Any], **defaults: Any) -> None:
        if unknown := options.keys() - COMMON.keys():
            raise TypeError(f"{type(self).__name__} has no setting {', '.join(sorted(unknown))}")
        super().__init__(params, {**defaults, **COMMON, **options})

    # ------------------------------------------------------------------ given by each algorithm

    def new_state(self, p: Tensor, group: Options) -> State:
        """What parameter `p` begins with, on its device; a `step` from `no_steps`, if counted."""
        raise NotImplementedError

    def update(self, p: Tensor, grad: Tensor, state: State, group: Options) -> None:
        """One step of `p` and its state, in place; `step` already counts it.

        An `elementwise` update gets slabs of all of these, and a gradient to descend along.
        Another gets the whole, and takes `gradient` of it; if they are in `shards`, what is here.
        """
        raise NotImplementedError

    def check(self, group: Mapping[str, Any]) -> None:
        """Refuse settings that are out of range, of a new group or a loaded one."""
        check_common(self, group)

    def check_parameter(self, p: Tensor, group: Options) -> None:
        """Refuse a parameter that this algorithm cannot train with the group's settings."""
        if p.is_complex():
            raise self.error("a parameter is complex", "give torch.view_as_real of it")
        if isinstance(p, LowPrecisionTensor) and not self.elementwise:
            raise self.error("it cannot train parameters in low precision",
                             "use SGD, Adam, AdamW or AdamA, or skip= in quantize_parameters_")

    def by_rows(self, name: str, p: Tensor, group: Options) -> bool:
        """Whether state `name` has the rows of `p`, so that shards of `p` go with shards of it."""
        return True

    # ------------------------------------------------------------------ for their use

    def error(self, what: str, do: str) -> OptimizerError:
        return OptimizerError(what, where=f"memopt.optim.{type(self).__name__}", do=do)

    def check_at_least(self, group: Mapping[str, Any], name: str, least: float) -> None:
        if not group[name] >= least:
            raise self.error(f"{name} is {group[name]}", f"choose {name} of at least {least}")

    def check_betas(self, group: Mapping[str, Any], count: int) -> None:
        betas = group["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != count or not all(
                not isinstance(b, Tensor | str) and 0 <= b < 1 for b in betas):
            raise self.error(f"betas are {betas}", f"choose {count} numbers in [0, 1)")

    @staticmethod
    def no_steps() -> Tensor:
        """A step count of 0, on the host as torch's: reading it waits for no device."""
        wide = torch.get_default_dtype() == torch.float64
        return torch.zeros((), dtype=torch.float64 if wide else torch.float32, device="cpu")

    @staticmethod
    def count(state: State) -> Any:
        """The steps so far, this one included: a float, or under capture a 0-dim float64 tensor."""
        step = state["step"]
        return step.to(torch.float64) if torch.compiler.is_compiling() else step.item()

    @staticmethod
    def rate(group: Options) -> Any:
        """The learning rate, a number or a 0-dim tensor."""
        lr = group["lr"]
        return lr.reshape(()) if torch.is_tensor(lr) and lr.dim() else lr

    @staticmethod
    def gradient(grad: Tensor, slab: Slab | None, group: Options) -> Tensor:
        """One slab of the gradient to descend along, in the type of the arithmetic."""
        part = read_weight(grad, {}, slab, None)
        if Optimizer.weight_format(grad, group) is not None or (
                group["state_bits"] != 32 and grad.numel() >= SMALL):
            part = part.to(precise(part))
        return -part if group["maximize"] else part

    def formats(self, p: Tensor, group: Options) -> Formats:
        """The formats of the moments of `p` that are not in full precision."""
        return formats_of(p, group, self.moments)

    @staticmethod
    def weight_format(p: Tensor, group: Options) -> Rounded | None:
        """How a parameter is stored that is updated in float32; None for one updated as it is."""
        if isinstance(p, LowPrecisionTensor) or not group["weight_bits"] or p.dtype != torch.bfloat16:
            return None
        return Rounded(group["rounding_seed"] ^ OF_WEIGHTS, group["weight_bits"], first=group.get("place", 0))

    def first_state(self, p: Tensor, group: Options) -> State:
        """`new_state`, with what random rounding and 24 or 32 bits need."""
        p = self.shards.local(p) if self.elementwise else p
        form, low = self.weight_format(p, group), isinstance(p, LowPrecisionTensor)
        like = p if form is None and not low else torch.empty_like(p, dtype=precise(p))
        state = self.new_state(like, group)
        if low and group["gradient_bits"] != 32:
            state[GRADIENT] = torch.zeros_like(like)
        if low and p.form.seed is not None:
            state[DRAWS] = p.draws.clone()  # from where the parameter is: each draws other numbers
        if "step" not in state and (form is not None and form.random or (
                group["state_bits"] == 16 and state.keys() & self.formats(p, group).keys())):
            state["step"] = self.no_steps()
        if form is not None and form.bits in LOW:
            state[CORRECTION] = torch.zeros(self.shards.local(p).shape, dtype=LOW[form.bits], device=p.device)
        return state

    def in_blocks(self, group: Options, p: Tensor, *others: Tensor) -> list[Tensor]:
        """A parameter, and what has its shape, in the blocks of the moments, if all have some, for an
        elementwise update: so that loops over parameter and moments can be fused."""
        if isinstance(p, LowPrecisionTensor):
            return vectors(p, others)
        formats = self.formats(p, group)
        if not (formats and self.moments.keys() <= formats.keys() and p.is_contiguous()):
            return [p, *others]
        form = next(iter(formats.values()))
        shape = (-1, *form.shape) if p.numel() % form.block == 0 else (-1,)
        return [p.view(shape), *(other.reshape(shape) for other in others)]

    def block(self, p: Tensor, group: Options) -> int:
        """Of how many elements the slabs of `p` are whole multiples."""
        forms = [*self.formats(p, group).values(), self.weight_format(p, group)]
        if isinstance(p, LowPrecisionTensor):
            forms.append(p.form)
        return math.lcm(*(form.block for form in forms if form is not None))

    def slabs(self, p: Tensor, group: Options) -> list[Slab | None]:
        """The slabs of `p`, each of whole blocks of its formats."""
        return slabs(p, self.block(p, group), isinstance(p, LowPrecisionTensor))

    # ------------------------------------------------------------------ the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    def _step(self) -> None:
        self._init_groups()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._guarded(p, p.grad, self.state[p], group)

    def _init_groups(self) -> None:
        """State for all gradients before any is used: a refusal leaves nothing half done."""
        for group in self.param_groups:
            self._init_group(group)

    def _init_group(self, group: Options) -> None:
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.grad.layout is not torch.strided:
                raise self.error("a gradient is sparse", "use torch.optim.SparseAdam, or make the "
                                 "layer's gradient dense (nn.Embedding(sparse=False))")
            if not self.state[p]:
                state = self.first_state(p, group)
                self.state[p].update(compressed(state, self.formats(self.shards.local(p), group)))

    def _guarded(self, p: Tensor, grad: Tensor, state: State, group: Options) -> None:
        """One step, unless the gradient is not finite and the group minds."""
        if not group["skip_nonfinite"]:
            return self._advance(p, grad, state, group)
        keep, here = self.finite(grad, p), self.shards.local(p)
        if not torch.compiler.is_compiling():
            if keep:
                self._advance(p, grad, state, group)
        elif here.device.type == "cpu" and one_operator.applies(self, here, group, self.shards.largest(p.shape)):
            self._advance(p, grad, state, {**group, one_operator.KEEP: keep}, keep)
        else:  # an operator has a branch of its own, a graph has none: it takes the old values back
            before = [(tensor, tensor.clone()) for tensor in (here, *state.values())]
            self._advance(p, grad, state, group)
            for tensor, old in before:
                tensor.copy_(torch.where(keep.to(tensor.device), tensor, old))

    def _advance(self, p: Tensor, grad: Tensor, state: State, group: Options, counts: Any = 1) -> None:
        if "step" in state:
            state["step"].add_(counts)
        if group["max_norm"] is not None:
            grad = self.clip(grad, p, group["max_norm"])
        here = self.shards.local(p)
        if one_operator.applies(self, here, group):
            one_operator.apply(self, "_update_in_slabs", here, self.shards.local(grad), state, group)
        else:
            (self._update_in_slabs if self.elementwise else self.update)(p, grad, state, group)

    def _update_in_slabs(self, p: Tensor, grad: Any, state: State, group: Options) -> None:
        p, grad = self.in_blocks(group, self.shards.local(p), self.shards.local(grad))
        self.in_slabs(p, state, group, lambda slab, part: self.move(p, state, slab, group, lambda weight:
                      self.update(weight, self.gradient(grad, slab, group), part, group)))

    def finite(self, grad: Tensor, p: Tensor) -> Tensor:
        """Whether no element of the gradient of `p` is NaN or infinite, on any rank."""
        return self.shards.everywhere(finite(self.shards.local(grad)), p)

    def clip(self, grad: Tensor, p: Tensor, limit: Any) -> Tensor:
        """The gradient of `p`, made no longer than `limit` in place."""
        if self.shards is WHOLE:
            return clipped(grad, limit)
        here = self.shards.local(grad)
        square = torch.linalg.vector_norm(here, dtype=precise(here)) ** 2
        here.mul_((limit / self.shards.total(square, p) ** 0.5).clamp(max=1.0))
        return grad

    def in_slabs(self, p: Tensor, state: State, group: Options,
                 change: Callable[[Slab | None, State], None]) -> None:
        """`change` every slab of a state in place, by its tensors in full precision."""
        formats = self.formats(p, group)
        if DRAWS in state:
            state[DRAWS].add_(1)
        for slab in self.slabs(p, group):
            part = {name: read(state, name, p, slab, formats) for name in state
                    if name not in (CORRECTION, GRADIENT) and not name.endswith("_scale")
                    and isinstance(state[name], Tensor)}
            change(slab, part)
            for name in formats:
                if name in part:
                    write(state, name, part[name], p, slab, formats)

    def move(self, p: Tensor, state: State, slab: Slab | None, group: Options,
             change: Callable[[Tensor], None]) -> None:
        """`change` one slab of a parameter in place, in the type of the arithmetic."""
        form = self.weight_format(p, group)
        weight = read_weight(p, state, slab, form)
        change(weight)
        write_weight(p, weight, state, slab, form)

    # ------------------------------------------------------------------ groups and checkpoints

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        check(self, {**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for p in group["params"]:
                self.check_parameter(p, group)
        except OptimizerError:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """As in `torch.optim`. Low-bit states are in full precision: any `state_bits` loads them.

        `correction` is there as it is: None and 16 `weight_bits` leave it, and 24 and 32 begin without.
        """
        packed = super().state_dict()
        for mine, group in zip(self.param_groups, packed["param_groups"]):
            for p, index in zip(mine["params"], group["params"]):
                if index in packed["state"]:
                    packed["state"][index] = self.saved_state(packed["state"][index], p, mine)
        return packed

    def saved_state(self, state: State, p: Tensor, group: Options) -> State:
        """The state of `p` in full precision and, of shards, as DTensors."""
        here = self.shards.local(p)
        state = expanded(state, here, self.formats(here, group))
        return {name: self.shards.saved(value, p) if isinstance(value, Tensor) and self.by_rows(
            name, p, group) else value for name, value in state.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in `torch.optim`, from this class or torch's of the same name.

        Every tensor gets the type that the state has here (torch would give it the
        parameter's), so that training goes on bit by bit where it was saved.

        Raises:
            OptimizerError: the state is another optimizer's. Nothing was loaded.
        """
        given: dict[str, Any] = {}
        # A hook, so that it sees what the user's own hooks have made of the checkpoint.
        handle = self.register_load_state_dict_pre_hook(
            lambda _, state: given.update(checked(self, state)) or given)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        restore(self, given)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.update({**self.defaults, **group, **FLAGS})  # how another class ran its update is no setting here


def finite(grad: Tensor) -> Tensor:
    """Whether no element is NaN or infinite. The largest magnitude knows, and takes no memory."""
    if not grad.numel():
        return grad.sum().isfinite()  # no constant: other ranks communicate behind their gradient
    return torch.linalg.vector_norm(grad, float("inf")).isfinite()


def clipped(grad: Tensor, limit: Any) -> Tensor:
    """g · min(1, limit/‖g‖), in place; a gradient of zeros stays as it is."""
    norm = torch.linalg.vector_norm(grad, dtype=precise(grad))
    return grad.mul_((limit / norm).clamp(max=1.0))
