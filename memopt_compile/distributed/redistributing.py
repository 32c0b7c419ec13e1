"""Ranks say so before eager code has a DTensor gathered, by ``p.full_tensor()`` or of what `state_dict()` gives out, or saved
by torch.distributed.checkpoint.

Those are methods of PyTorch's, and so two of `DTensor` are wrapped in `shard_`: `redistribute`, and the one by which a save
begins. The wrappers act for DTensors over a mesh that shares a model, outside of traces. Operators that redistribute
what they are given go past them, and saves on another thread, beside which the step goes on.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ..quantization.parameters import LowPrecisionTensor
from . import meeting, wrapping
from .copying import let_windows_be_copied
from .lost import naming_the_lost

# The mesh of all ranks by that of those which share a model. DTensor's operators may give results an equal one.
_watched: dict[Any, Any] = {}
_said: ContextVar[bool] = ContextVar("_said", default=False)


def watch(mesh: Any, all_ranks: Any) -> None:
    """From now on the ranks of `mesh`, which are all or share one of several replicas, say so before one of them
    redistributes a DTensor over it."""
    _watched[mesh] = all_ranks
    let_windows_be_copied(_watched)
    wrapping.replace(DTensor, "redistribute", _saying)
    wrapping.replace(DTensor, "__create_write_items__", _saying_of_a_save)


@contextlib.contextmanager
def said() -> Iterator[None]:
    """A scope in which ranks have said already what they gather."""
    token = _said.set(True)
    try:
        yield
    finally:
        _said.reset(token)


def _saying(redistribute: Any) -> Any:
    @functools.wraps(redistribute)
    def redistribute_together(self: DTensor, device_mesh: Any = None, placements: Any = None, **how: Any) -> DTensor:
        mesh = self.device_mesh
        if not torch.compiler.is_compiling() and mesh in _watched and not _said.get() and _sends(self, placements):
            where = f"full_tensor() or redistribute() of a DTensor of shape {tuple(self.shape)}"
            with naming_the_lost(_watched[mesh], where):
                meeting.come_together(f"gathers a DTensor of shape {tuple(self.shape)}", _watched[mesh], where,
                                      f"{self.shape} {self.dtype} {self.placements} {placements}", replicas=False)
        return redistribute(self, device_mesh, placements, **how)

    return redistribute_together


def _saying_of_a_save(write_items: Any) -> Any:
    @functools.wraps(write_items)
    def write_items_together(self: DTensor, name: str, value: Any) -> Any:
        all_ranks = _watched.get(self.device_mesh)
        if all_ranks is not None and threading.current_thread() is threading.main_thread():
            where = f"saving {name} by torch.distributed.checkpoint"
            with naming_the_lost(all_ranks, where):
                meeting.come_together(f"saves {name} by torch.distributed.checkpoint", all_ranks, where, replicas=False)
        return write_items(self, name, value)

    return write_items_together


def _sends(t: DTensor, placements: Any) -> bool:
    """Whether ranks have values to send for it: what all have is cut without a word, and a trace has none."""
    with torch.no_grad():
        here = t.to_local()
    parts = here.parts if isinstance(here, LowPrecisionTensor) else [here]
    return all(type(part) in (Tensor, nn.Parameter) for part in parts) and any(
        mine != wanted and mine != Replicate() for mine, wanted in zip(t.placements, placements or ()))
