"""The ranks that share the layers of a model, as DTensors say, and the inputs of a step that all have alike.

Inputs are compared by their bytes when the step is compiled, unless a DTensor says that each rank has
its own. Batch, numbers and random generators, which code between steps may change, are compared again in
every call; so is what is written to parameters, buffers and states between steps, as far as their versions say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdRef

from .. import compat
from ..compat import trace
from ..errors import OptionError, RankError
from ..step_graph import Role, StepGraph, describe, op_name
from . import agreement, planned
from .storage import storage_of

Origin = Sequence[tuple[str, Any, bool]]
SMALLEST = 1 << 12  # elements that are compared at once


@dataclass(frozen=True)
class Group:
    """The ranks of a tensor-parallel group, of which this process is number `rank`. `inputs` are the
    placeholders that were the same on all of them, by name; with `random` so were the generators."""

    name: str
    rank: int
    ranks: int
    mesh: Any
    inputs: frozenset[str] = frozenset()
    random: bool = False

    def exchange(self, value: Any) -> list[Any]:
        """What all ranks give, while torch may be tracing."""
        with trace.real_tensors():
            return agreement.exchange(value, self.mesh)


def group_of(step: StepGraph, origin: Origin, where: str) -> Group:
    """The group that shares the layers of `step`, with what all of it have alike.

    Raises:
        OptionError: no parameter is shared so, they are shared in more than one way, or the ranks' steps
            have other sizes: with these they would plan each for itself, and wait for each other.
    """
    where = f"{where}, partition_activations=True"
    found = {(example.device_mesh, dim) for _, example, _ in origin
             if isinstance(example, DTensor) and storage_of(example) is None
             for dim, placement in enumerate(example.placements) if placement.is_shard()}
    if len(found) != 1:
        what = (f"parameters are shared along {len(found)} dimensions of meshes" if found else
                "no parameter is shared by tensor parallelism: no two ranks have an activation alike")
        raise OptionError(what, where=where, do="call torch.distributed.tensor.parallel.parallelize_module on "
                          "the model, with one dimension of one mesh; or leave the option out")
    (shared, dim), = found
    mesh = shared
    if mesh.ndim > 1:
        if not mesh.mesh_dim_names:
            raise OptionError("the mesh has several dimensions and no names", where=where,
                              do="give init_device_mesh mesh_dim_names")
        mesh = mesh[mesh.mesh_dim_names[dim]]
    group = Group(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size(), mesh)
    with trace.real_tensors():  # torch is tracing
        mine = [_value(step, i, origin, shared, dim) for i in range(len(step.inputs))]
    mine.append(" ".join(digest(state) for state in _generators()))
    everyone = group.exchange((mine, [f"{op_name(node)}: {describe(node)}" for node in step.graph.nodes]))
    for sizes in zip_longest(*(each for _, each in everyone)):
        if len(set(sizes)) > 1:
            raise OptionError(f"ranks of the tensor-parallel group have other sizes: {' and '.join(map(str, sizes))}",
                              where=where, do="have the number of ranks divide heads, widths and vocabulary, or "
                              "leave the option out")
    same = [len(set(texts)) == 1 and texts[0] is not None for texts in zip(*(each for each, _ in everyone))]
    return replace(group, inputs=frozenset(i.name for i, alike in zip(step.inputs, same) if alike),
                   random=same[-1])


def _value(step: StepGraph, position: int, origin: Origin, shared: Any, dim: int) -> str | None:
    """An input as text; None if it is known to be this rank's own, or is not there yet. Parameters are
    shared along dimension `dim` of a mesh."""
    index = compat.input_descriptor_index(step.placeholders[position])
    example = origin[position if index is None else index][1]
    if isinstance(example, DTensor):
        alike = example.device_mesh == shared and example.placements[dim].is_replicate()
        example = example.to_local() if alike else None
    return digest(example) if isinstance(example, Tensor) else None if example is None else repr(example)


def digest(tensor: Tensor) -> str:
    """Type, shape and bytes as text; of a plan for ranks that are not there no bytes."""
    said = f"{tensor.dtype} {tuple(tensor.shape)} "
    if trace.is_fake(tensor):
        return said
    with trace.real_tensors():
        plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return said + hashlib.sha256(plain.numpy()).hexdigest()


def _generators() -> list[Tensor]:
    """The states of the generators that a step may draw from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def comparing(run: Callable, step: StepGraph, origin: Origin, where: str) -> Callable:
    """`run`, the step as it is called, if batch, numbers and generators are the same on all ranks, and so is whatever of
    the model and the optimizer somebody else has written to since the last call.

    Raises:
        RankError: they are not, when called.
    """
    group = step.parallel
    given = {each.label: each for each in reversed(step.inputs)}  # of a DTensor the tensor inside comes first
    same = {i: given[label].role in (Role.BATCH, Role.NUMBER) or not isinstance(example, Tensor)
            for i, (label, example, _) in enumerate(origin)
            if isinstance(example, Tensor | float | int) and label in given and given[label].name in group.inputs}
    called = [i for i, in_every_call in same.items() if in_every_call]
    kept = [i for i, in_every_call in same.items() if not in_every_call]
    names = [*(origin[i][0] for i in (*called, *kept)), "the state of the random generators"]
    left = list[tuple[WeakIdRef, int, int]]()  # by the last call

    def seen(inputs: Sequence[Any]) -> Iterator[tuple[WeakIdRef, int, int]]:
        """What of a tensor changes with each write, to it or to the tensor inside."""
        return ((WeakIdRef(each), each._version, _own(each)._version) for each in (inputs[i] for i in kept))

    def everywhere(mine: list[Tensor]) -> Tensor:
        sent = torch.stack([value.to(group.mesh.device_type) for value in mine])
        found = sent.new_empty(group.ranks, len(sent))
        torch.distributed.all_gather(list(found), sent, group=group.mesh.get_group())
        return found

    def compare(inputs: Sequence[Any]) -> None:
        drawn = torch.cat(_generators()) if group.random else torch.empty(0)
        written = [bool(left) and now != before for now, before in zip(seen(inputs), left or kept)]
        found = everywhere([*(fingerprint(torch.as_tensor(inputs[i])) for i in called), *map(torch.tensor, map(int, written)),
                            fingerprint(drawn)])
        anywhere = found[:, len(called):-1].any(0).tolist()
        if any(anywhere):  # on some rank
            found[:, len(called):-1] = everywhere([fingerprint(_own(inputs[i])) if new else torch.tensor(0)
                                                   for i, new in zip(kept, anywhere)])
        other = (found != found[0]).any(0).tolist()
        if any(other):
            raise RankError(
                f"{' and '.join(n for n, o in zip(names, other) if o)}: not the same on all ranks of the "
                "tensor-parallel group, each of which keeps a part of what follows",
                where=f"{where}, partition_activations=True",
                do="give all ranks of the group the same batch and seed, and write the same to what they have alike; or leave "
                "the option out")

    def run_if_alike(*inputs: Any) -> Any:
        compare(inputs)
        result = run(*inputs)
        left[:] = seen(inputs)
        return result

    return run if planned.active() else run_if_alike


def _own(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def fingerprint(tensor: Tensor) -> Tensor:
    """A number that other bytes, or the same in another order, would hardly have. Beside the tensor it takes a
    small part of its bytes."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = flat[:flat.numel() // 8 * 8].view(torch.int64)
    length = max(SMALLEST, words.numel() // 64)
    weights = torch.arange(1, 2 * length, 2, device=flat.device).pow_(5)
    found = (flat[words.numel() * 8:].to(torch.int64) * weights[:flat.numel() % 8]).sum()
    for piece in words.split(length):
        found = found * 0x9E3779B1 + (piece * weights[:piece.numel()]).sum()
    return found
