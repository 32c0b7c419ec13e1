"""``memopt.shard_(model, opt, mesh, stage)``: the storage that a step with ZeRO is captured from.

Every parameter that is trained becomes a DTensor with placement ``Shard(0)``, in the model and in the
optimizer, and so does each tensor of its state: an update touches nothing but this rank's rows.
(Parameters without a dimension cannot be cut; they are ``Replicate()``.) A module gives out the
whole parameter when its attribute is read: a property gathers it, and sends the gradient back as
``Partial("avg")``, which a reduce-scatter turns into this rank's rows of the mean. So eager runs
too, `state_dict` has the plain names, and a captured step has all collectives as nodes.

On a mesh of two dimensions the ranks along the last one share a model, and those along the first have
replicas of it. There the rows of the mean go through an all-reduce besides: a DTensor over the replicas
stands between the parameter and its reading, with the gradient again ``Partial("avg")``.

Why DTensor: its operators keep the numbers right whatever the code around the step does with a
parameter (norms, checkpoints, an update in eager), and torch.distributed.checkpoint knows it.
What `storage` keeps besides in stages 1 and 2 is seen by compiled steps alone.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import replaced
from ..optim.base import Optimizer
from ..optim.low_bit import CORRECTION, compressed, expanded
from ..optim.shards import Rows
from ..quantization.parameters import LowPrecisionTensor
from ..quantization.rounding import from_bytes
from . import low_precision, redistributing, whole_checkpoints, wrapping
from .first_values import become_the_first, materialize, of_the_first
from .reading import reading
from .refusals import check
from .storage import Storage, count_load, count_updates, remember, storage_of, window


def shard_(model: nn.Module, opt: torch.optim.Optimizer, mesh: Any, stage: int = 3) -> None:
    """Keep of parameters and optimizer state only what stage `stage` of ZeRO keeps, in place.

    Call it on every rank, after making the optimizer (or loading it) and before the first step.
    All ranks go on from the values of the first rank of the mesh, in parameters, frozen or not, and in
    buffers. Parameters on the meta device are made module by module, by `reset_parameters`, so that the
    whole model is never there.

    Args:
        model: its parameters are replaced; buffers, and in stages 1 and 2 frozen parameters, stay, one for
            each rank.
        opt: of `torch.optim`, with an update that is elementwise, or of `memopt.optim`.
        mesh: a DeviceMesh over the ranks that share the model, or one of two dimensions with names:
            replicas along the first (across nodes), and sharing along the last (within a node).
        stage: 1 and 2 shard optimizer state, and gradients; 3 parameters too.

    Raises:
        OptionError: something of this is not so. Nothing was changed, unless a module leaves something
            of the meta device without values: that is seen when its turn comes.
    """
    check(model, opt, mesh, stage)
    shard, replicas = (mesh, None) if mesh.ndim == 1 else (mesh[name] for name in mesh.mesh_dim_names[::-1])
    redistributing.watch(shard, mesh)
    count_updates()
    wrapping.replace(DTensor, "__create_chunk_list__", count_load)
    class_of = functools.cache(functools.partial(reading, replicas=replicas))
    if isinstance(opt, Optimizer):
        opt.shards = Rows(shard)
    else:
        opt.register_load_state_dict_pre_hook(whole_checkpoints.into_optimizer)
    made: WeakIdKeyDictionary = WeakIdKeyDictionary()  # a whole parameter dies once it is replaced
    for path, module in model.named_modules():
        given = dict(module._parameters)  # as the optimizer has them
        materialize(path, module, shard, made)
        for buffer in module._buffers.values():
            if buffer is not None:
                become_the_first(buffer, shard, replicas)
        names = []
        for name, p in given.items():
            if p is None:
                continue
            here, full_name = module._parameters[name], f"{path}.{name}" if path else name
            if p not in made and not p.requires_grad and stage < 3:  # frozen: every rank keeps all of it
                become_the_first(here, shard, replicas)
                made[p] = here
                replaced.note(here, full_name, replaced.FROZEN)
            elif p not in made:
                made[p] = _sharded(here.detach(), p.requires_grad, full_name, shard, replicas, mesh, stage)
            if made[p] is not p:
                replaced.note(p, full_name, replaced.SHARDING)  # to optimizers that are not here
                _replace(opt, p, made[p], replicas)
            module._parameters[name] = made[p]
            if storage_of(made[p]) is not None:
                names.append(name)
        if names:
            module.__class__ = class_of(type(module), tuple(names))
            module.register_load_state_dict_pre_hook(whole_checkpoints.into_model)
        if any(isinstance(p, LowPrecisionTensor) for p in given.values()):
            module.register_state_dict_post_hook(low_precision.saved)
        del given


def _sharded(p: Tensor, trained: bool, name: str, mesh: Any, replicas: Any, all_ranks: Any,
             stage: int) -> nn.Parameter:
    placement = Shard(0) if p.dim() else Replicate()
    low = isinstance(p, LowPrecisionTensor)
    given = distribute_tensor(of_the_first(p.dequantize() if low else p, replicas), mesh, [placement])
    start, kept = _start(given), []
    rows = given.to_local()
    if low:
        rows = low_precision.rows_of(p, rows, start, mesh, of_the_first(p.draws, replicas))
    if stage < 3 and p.dim():
        if low:
            rows, kept = low_precision.windows(rows, p, mesh)
        else:
            kept = [window(rows, start, -(-len(p) // mesh.size()), len(p))]
            rows = kept[0].rows
    if low or kept:
        given = DTensor.from_local(rows, mesh, [placement], run_check=False, shape=p.shape,
                                   stride=given.stride())
    new = nn.Parameter(given, requires_grad=trained)
    with torch.no_grad():  # so that it is the tensor inside, and no view that autograd follows
        here = new.to_local()
    kept = [each._replace(rows=part) for each, part in zip(kept, here.parts if low else [here])]
    remember(Storage(name, stage, mesh, all_ranks, weakref.ref(new), kept))
    return new


def _start(given: DTensor) -> int:
    """The row of the whole tensor that this rank's rows begin with."""
    if not given.dim():
        return 0
    each = -(-given.shape[0] // given.device_mesh.size())
    return min(given.device_mesh.get_local_rank() * each, given.shape[0])


def _replace(opt: torch.optim.Optimizer, p: Tensor, new: nn.Parameter, replicas: Any) -> None:
    """Let the optimizer update `new`, with the state of `p`."""
    for group in opt.param_groups:
        if p in opt.state and isinstance(opt, Optimizer) and any(each is p for each in group["params"]):
            opt.state[new] = _rows_of_state(opt, p, new, group)
        group["params"] = [new if each is p else each for each in group["params"]]
    if p in opt.state:
        opt.state[new] = {
            name: distribute_tensor(of_the_first(value, replicas), new.device_mesh, list(new.placements))
            if isinstance(value, Tensor) and value.shape == p.shape and p.dim() else value
            for name, value in opt.state.pop(p).items()}


def _rows_of_state(opt: Optimizer, p: Tensor, new: nn.Parameter, group: Any) -> dict[str, Any]:
    """The state of `p` for this rank's rows of it, in the formats of `state_bits`."""
    whole = expanded(opt.state.pop(p), p, opt.formats(p, group))
    for name, value in whole.items():
        if isinstance(value, Tensor) and value.dim():
            placement = Shard(0) if opt.by_rows(name, p, group) else Replicate()
            whole[name] = distribute_tensor(value, new.device_mesh, [placement]).to_local()
    if CORRECTION in whole:
        whole[CORRECTION] = from_bytes(whole[CORRECTION])
    return compressed(whole, opt.formats(new.to_local(), group))
