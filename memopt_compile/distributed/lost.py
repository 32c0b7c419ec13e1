"""Which rank is gone, when a step fails because one is.

A transport says that a connection was closed, not whose. So each rank whose step fails by its transport
leaves a word in the store by which the ranks have found each other, and looks there for some seconds
for the others. Who says nothing has ended, or still waits for one that has. An error of another kind is
this rank's own, and goes on as it is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from ..compat import trace
from ..errors import RankError
from .agreement import numbers

PATIENCE_SECONDS = 5.0


@contextlib.contextmanager
def naming_the_lost(mesh: Any, where: str) -> Iterator[None]:
    """A scope in which ranks of `mesh` talk: with a `RankError` where another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        if not _of_transport(error):
            raise
        silent = _silent(mesh)
        who = ("the rank that kept the group's store is gone" if silent is None else
               f"{_named(silent)} of {mesh.size()} {'has' if len(silent) == 1 else 'have'} ended, or "
               f"{'waits' if len(silent) == 1 else 'wait'} for one that has" if silent else "every rank has lost its connections")
        raise RankError(f"{who}: {_first_sentence(error)}", where=where,
                        do="see what that rank said last; torchrun ends all and names the first that "
                        "ended") from error


def _first_sentence(error: RuntimeError) -> str:
    """What the transport says, without its advice."""
    return str(error).splitlines()[0].split(". ")[0]


def _of_transport(error: RuntimeError) -> bool:
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower()


def _silent(mesh: Any) -> list[int] | None:
    """Ranks of the mesh that do not fail within some seconds too; None if they cannot be asked."""
    others = [rank for rank in numbers(mesh) if rank != torch.distributed.get_rank()]
    end = time.monotonic() + PATIENCE_SECONDS
    try:
        store = trace.default_store()
        store.set(_word(torch.distributed.get_rank()), "")
        while others and time.monotonic() < end:
            others = [rank for rank in others if not store.check([_word(rank)])]
            time.sleep(0.05)
    except RuntimeError:
        return None
    return others


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _word(rank: int) -> str:
    return f"memopt/failed/{rank}"
