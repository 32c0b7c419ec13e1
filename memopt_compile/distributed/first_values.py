"""What the tensors of a model begin with when `shard_` has them: those of the meta device are made, and what
every rank keeps for itself gets the values of the first rank."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, distribute_tensor

from ..compat import trace
from ..errors import OptionError
from ..quantization.parameters import LowPrecisionTensor


def of_the_first(value: Tensor, mesh: Any) -> Tensor:
    """`value` as the first rank of `mesh` has it; as it is here without a mesh."""
    return value if mesh is None else distribute_tensor(value, mesh, [Replicate()]).to_local()


@torch.no_grad()
def become_the_first(t: Tensor, shard: Any, replicas: Any) -> None:
    """Write into `t` what the first rank of all has there. Bytes travel: gloo does not know all types.

    A buffer that is sparse or of a class of its own stays as it is.
    """
    if isinstance(t, LowPrecisionTensor):
        for part in t.parts:
            become_the_first(part, shard, replicas)
        return
    if type(t) not in (Tensor, nn.Parameter) and not trace.is_fake(t) or t.layout is not torch.strided:
        return
    for dim in range(t.dim()):
        if t.stride(dim) == 0:  # one element is read as many, and written once
            t = t.narrow(dim, 0, min(1, t.shape[dim]))
    mine = t.to(shard.device_type).clone(memory_format=torch.contiguous_format).view(-1)
    first = of_the_first(of_the_first(mine.view(torch.uint8), replicas), shard)
    t.copy_(first.view(t.dtype).view(t.shape))


def materialize(path: str, module: nn.Module, mesh: Any, known: Container[Tensor] = ()) -> None:
    """Give what this module has on the meta device its first values, by `reset_parameters`.

    A tensor that the reset leaves alone would keep whatever was in that memory. So all are filled before,
    those of floating point with NaN. Where a fill is still to be seen (an integer or a mask may have that
    value by right), the reset is made again from another fill and with the same random numbers: what is not
    the same again is of the fill.

    Args:
        known: parameters that another module has too, and has been given values for.

    Raises:
        OptionError: a tensor was not set, or not all of it.
    """
    made: dict[Tensor, Tensor] = {}
    places = [(slots, name) for slots in (module._parameters, module._buffers) for name, t in slots.items()
              if t is not None and t.is_meta and t not in known]
    for slots, name in places:
        t = slots[name]
        if t not in made:
            here = torch.empty_like(t, device=mesh.device_type)
            made[t] = nn.Parameter(here, t.requires_grad) if isinstance(t, nn.Parameter) else here
        slots[name] = made[t]
    if not made:
        return
    if any(trace.is_fake(t) for t in made.values()):  # of a plan, without values
        module.reset_parameters()
        return
    state = _random(mesh.device_type)
    _fill(made.values(), 0)
    module.reset_parameters()
    doubtful = {}
    for slots, name in places:
        value = slots[name].detach()
        seen = value.isnan() if _has_nan(value) else value == _fills(value)[0]
        if seen.any():
            doubtful[name] = slots, value.clone(), seen
    if not doubtful:
        return
    after = _random(mesh.device_type)
    _set_random(mesh.device_type, state)
    _fill(made.values(), 1)
    module.reset_parameters()
    _set_random(mesh.device_type, after)
    left = [f"{path}.{name}" if path else name for name, (slots, before, seen) in doubtful.items()
            if (seen & _differ(slots[name].detach(), before)).any()]
    if left:
        raise OptionError(
            f"reset_parameters() of {path or 'the model'} ({type(module).__name__}) leaves {', '.join(left)} of the "
            "meta device without values", where="memopt.shard_", do="set them there, or make the module on its "
            "device; and make the model anew: a part of it has been sharded")


def _has_nan(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _fills(t: Tensor) -> tuple[Any, Any]:
    """Two values for its elements."""
    if t.dtype is torch.bool:
        return True, False
    return float("nan") if _has_nan(t) else torch.iinfo(t.dtype).max, 0


def _differ(a: Tensor, b: Tensor) -> Tensor:
    return (a != b) & ~(a.isnan() & b.isnan())


@torch.no_grad()
def _fill(tensors: Iterable[Tensor], which: int) -> None:
    for t in tensors:
        t.fill_(_fills(t)[which])


def _random(device_type: str) -> list[Tensor]:
    """Where the random numbers of the host, and of the device, stand."""
    of_device = [] if device_type == "cpu" else [torch.get_device_module(device_type).get_rng_state()]
    return [torch.get_rng_state(), *of_device]


def _set_random(device_type: str, states: list[Tensor]) -> None:
    host, *of_device = states
    torch.set_rng_state(host)
    for state in of_device:
        torch.get_device_module(device_type).set_rng_state(state)
