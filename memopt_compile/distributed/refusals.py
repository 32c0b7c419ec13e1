"""What cannot be sharded, and why: asked before anything is changed."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..compat import trace
from ..errors import OptionError, RankError
from ..optim.base import Optimizer
from ..optim.factors import FactoredOptimizer
from ..quantization.parameters import LowPrecisionTensor
from . import agreement
from .lost import naming_the_lost
from .meeting import come_together
from .storage import storage_of

# No element of these updates depends on another one: a part of the rows gets what it would in the whole.
# (Rprop's does not either, but it writes through a mask, which DTensor cannot.)
ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta",
               "ASGD")
WHERE = "memopt.shard_"


def check(model: nn.Module, opt: torch.optim.Optimizer, mesh: Any, stage: Any) -> None:
    """Raises:
        OptionError: `shard_` cannot do what this rank asks for.
        RankError: another rank is refused, or asks for something else. Every rank raises something.
    """
    _check_mesh(mesh)
    refused = None
    try:
        if type(stage) is not int or stage not in (1, 2, 3):
            raise _refusal(f"stage is {stage!r}", "choose stage=1, 2 or 3")
        if not (isinstance(model, nn.Module) and isinstance(opt, torch.optim.Optimizer)):
            raise _refusal(f"model is a {type(model).__name__} and opt a {type(opt).__name__}",
                           "give a torch.nn.Module and the torch.optim.Optimizer that trains it, in this order")
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise _refusal("the model is wrapped in DistributedDataParallel",
                           "give model.module: the gradients are averaged by shard_ itself")
        _check_optimizer(opt)
        _check_parameters(model, opt, mesh)
    except OptionError as error:
        refused = error
    with naming_the_lost(mesh, WHERE):
        come_together("shards a model", mesh, WHERE)
        others = agreement.exchange(refused and refused.what, mesh)
    if refused is not None:
        raise refused
    for place, what in enumerate(others):
        if what is not None:
            raise RankError(f"rank {agreement.numbers(mesh)[place]} is refused: {what}", where=WHERE, do="see that rank's error")
    agreement.compare(_description(model, opt, stage), mesh, "parameters or settings", WHERE,
                      "build the same model and optimizer on every rank")


def _description(model: nn.Module, opt: torch.optim.Optimizer, stage: int) -> list[str]:
    place = {id(p): i for i, group in enumerate(opt.param_groups) for p in group["params"]}
    settings = [{name: float(value) if isinstance(value, Tensor) else value
                 for name, value in group.items() if name != "params"} for group in opt.param_groups]
    return [f"stage {stage}", f"{type(opt).__name__} {settings}",
            *(f"{name} {tuple(p.shape)} {p.dtype} {getattr(p, 'form', '')} "
              f"{'trained' if p.requires_grad else 'frozen'} in "
              f"group {place.get(id(p))}" for name, p in model.named_parameters()),
            *(f"buffer {name} {tuple(b.shape)} {b.dtype} {b.layout}" for name, b in model.named_buffers())]


def _check_mesh(mesh: Any) -> None:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        raise _refusal("there is no process group",
                       "start with torchrun and call torch.distributed.init_process_group() first")
    if not isinstance(mesh, distributed.device_mesh.DeviceMesh):
        raise _refusal(f"mesh is a {type(mesh).__name__}", "make one: torch.distributed.device_mesh."
                       f"init_device_mesh('cpu', ({distributed.get_world_size()},))")
    if mesh.ndim > 2:
        raise _refusal(f"the mesh has {mesh.ndim} dimensions", "give the one that shares the model, such "
                       "as mesh['data'], or two: to replicate across, and to share within")
    if mesh.ndim == 2 and not mesh.mesh_dim_names:
        raise _refusal("the mesh has two dimensions without names", "name them: init_device_mesh(.., "
                       "mesh_dim_names=('replicate', 'shard')), the one to share the model in last")
    if mesh.get_coordinate() is None:
        raise _refusal(f"rank {distributed.get_rank()} is not in the mesh",
                       "make the mesh over this rank, or call shard_ on the ranks of the mesh only")
    if mesh.size(mesh.ndim - 1) < 2:
        raise _refusal("there is one process to share the model, and nothing to share",
                       "start several (torchrun --nproc-per-node 2), or leave shard_ out")


def _check_optimizer(opt: torch.optim.Optimizer) -> None:
    name = type(opt).__name__
    if isinstance(opt, Optimizer):
        _check_ours(opt, name)
        return
    known = {inspect.unwrap(getattr(torch.optim, n).step) for n in ELEMENTWISE}
    if inspect.unwrap(type(opt).step) not in known:
        raise _refusal(f"the update of {name} is not known to be elementwise, so that a part of the rows "
                       "might be updated otherwise", f"use one of torch.optim: {', '.join(ELEMENTWISE)}; or "
                       "of memopt.optim")


def _check_ours(opt: Optimizer, name: str) -> None:
    if not (opt.elementwise or isinstance(opt, FactoredOptimizer)):
        raise _refusal(f"the update of {name} is not elementwise, and nothing says what of it is summed up "
                       "over ranks", "use one of memopt.optim")
    if getattr(opt, "process_group", None) is not None:
        raise _refusal(f"{name} sums up its states over a process group of its own",
                       "leave process_group out: gradients are averaged by shard_ itself")
    for group in opt.param_groups:
        for setting, value in (("state_bits", 16), ("weight_bits", 16), ("weight_bits", 24)):
            if group[setting] == value:
                raise _refusal(f"{setting}={value} of {name} rounds each element by its place in the whole "
                               "parameter", "choose state_bits=32, 8, 4 or 1, and weight_bits=32 or none")


def _check_parameters(model: nn.Module, opt: torch.optim.Optimizer, mesh: Any) -> None:
    names = {id(p): name for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        if storage_of(p) is not None:
            raise _refusal(f"{name} is sharded already", "call shard_ once")
        if isinstance(p, DTensor):
            raise _refusal(f"{name} is a DTensor with placements {tuple(p.placements)}",
                           "shard plain parameters: other placements are not in this version")
        if type(p) not in (nn.Parameter, Tensor, LowPrecisionTensor) and not trace.is_fake(p):
            raise _refusal(f"{name} is a {type(p).__name__}", "give it its values before, and no "
                           "storage format of its own")
        if not p.is_meta and p.device.type != mesh.device_type:
            raise _refusal(f"{name} is on {p.device} and the mesh is of {mesh.device_type}",
                           f"move the model there, or make the mesh of {p.device.type!r}")
        if not p.is_contiguous():
            raise _refusal(f"{name} is not contiguous", "give the module a contiguous parameter")
        if p.dim() and not len(p):
            raise _refusal(f"{name} of shape {tuple(p.shape)} has no rows", "leave it out of the model")
        if p.is_complex() and not p.dim():
            raise _refusal(f"{name} is complex and has no dimension", "give it one, of a single row: torch.view_as_real "
                           "of a DTensor, which optimizers take, does not know the other")
        if p.grad is not None:
            raise _refusal(f"{name} has a gradient", "call opt.zero_grad() first")
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            raise _refusal(f"{name} has a gradient hook", "register hooks after shard_")
    for path, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            raise _refusal(f"{path} ({type(module).__name__}) keeps its parameters in a list of its "
                           "own", "shard the other modules: call shard_ on each of them")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise _refusal(f"{path} ({type(module).__name__}) has max_norm, by which it writes into its weight when "
                           "it reads it", "leave max_norm out, and write the rows that are too long yourself "
                           "behind the step: weight.copy_(..) of the one among model.parameters()")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise _refusal(f"{path} ({type(module).__name__}) has sparse gradients, which are not scattered",
                           "leave sparse=True out")
        on_meta = any(t is not None and t.is_meta
                      for t in (*module._parameters.values(), *module._buffers.values()))
        if on_meta and not hasattr(module, "reset_parameters"):
            raise _refusal(f"{path} ({type(module).__name__}) is on the meta device and has no "
                           "reset_parameters()", "give it one, or make it on its device")
    strange = sum(id(p) not in names for group in opt.param_groups for p in group["params"])
    if strange:
        raise _refusal(f"the optimizer has {strange} parameters that are not the model's",
                       "make the optimizer of model.parameters()")


def _refusal(what: str, do: str) -> OptionError:
    return OptionError(what, where=WHERE, do=do)
