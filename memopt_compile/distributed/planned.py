"""``memopt.planned_ranks(n)``: a scope in which one process plans for n ranks, without their memory.

Inside it torch.distributed has a process group of `n` ranks that sends nothing, and this process is
the first of them: DTensor cuts evenly by rounding up, so no rank has more rows. Tensors are fake: they
have shapes and no bytes. So a model of any size can be built, sharded and given to `memopt.explain`,
which plans the step that every rank would run. Nothing can be run there, and no values can be read.

What a kernel or a transport holds while it runs is not in such a plan: it is measured by running
operators, and here nothing runs. (NCCL copies nothing of what it sends, gloo does.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from ..compat import trace
from ..errors import OptionError

_active = False


def active() -> bool:
    """Whether this is a plan for ranks that are not there."""
    return _active


@contextlib.contextmanager
def planned_ranks(count: int, device_type: str = "cpu") -> Iterator[Any]:
    """Have this process stand for the first of `count` ranks; gives their DeviceMesh.

    Make the model and the optimizer inside, call `memopt.shard_` with the mesh, then
    `memopt.explain`. Code that makes its own mesh of `torch.distributed.get_world_size()` ranks works as
    it is.

    Raises:
        OptionError: `count` is no number of ranks, or the process has a process group.
    """
    global _active
    where = f"planned_ranks({count!r})"
    if type(count) is not int or count < 1:
        raise OptionError(f"{count!r} is no number of ranks", where=where, do="give 1 or more")
    if torch.distributed.is_initialized():
        raise OptionError("this process has a process group", where=where,
                          do="plan in a process of its own, without torchrun")
    trace.start_fake_group(count)
    _active = True
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh(device_type, (count,))
        with trace.fake_tensors(), _meshes_have_values():
            yield mesh
    finally:
        _active = False
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def _meshes_have_values() -> Iterator[None]:
    """A mesh reads from a tensor which ranks are in it; `init_device_mesh` makes that of all in order."""
    kind = torch.distributed.device_mesh.DeviceMesh

    def real(method: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with trace.real_tensors():
                ranks = kwargs.get("_rank_map")
                if ranks is not None and trace.is_fake(ranks):
                    kwargs["_rank_map"] = torch.arange(ranks.numel(), dtype=ranks.dtype)
                return method(*args, **kwargs)

        return run

    with contextlib.ExitStack() as stack:
        for name in ("__init__", "__getitem__"):
            stack.enter_context(mock.patch.object(kind, name, real(getattr(kind, name))))
        yield
