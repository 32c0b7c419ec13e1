"""Run a function on several ranks of real gloo processes."""

from __future__ import annotations

import faulthandler
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock
from forked import server, spare_time


def thinned(cases: Sequence) -> Sequence:
    """The last of `cases`, all with `--thorough`: a step is traced for seconds, by every rank."""
    return cases if "MEMOPT_THOROUGH" in os.environ else cases[-1:]


def place(factory: Any) -> Path:
    """The folder that all workers of one run of the tests share (`factory` is `tmp_path_factory`)."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def once(factory: Any, name: str, make: Callable[[Path], Any]) -> Any:
    """What ``make(place(factory) / name)`` returns, made by the worker that asks first: each has its own
    fixtures, and ranks take all cores as it is."""
    folder = place(factory) / name
    with FileLock(f"{folder}.lock"):
        if not (made := folder / "made.pt").exists():
            folder.mkdir(exist_ok=True)
            torch.save(make(folder), made)
    return torch.load(made, weights_only=False)


def on_ranks(count: int, folder: Path, function: Callable, *args: Any) -> list[Any]:
    """What ``function(rank, *args)`` returns on each of `count` ranks.

    They find each other by a file below `folder`: there is no port to be taken. A rank that waits for
    another in vain fails after three minutes, and says where each of its threads was. If a signal ends a rank
    (seen twice in hundreds of runs, once in both tries; its place is not known), that is a warning with what the ranks
    said, and all begin again, once, as processes that inherit nothing of the first ones' heap.

    Raises:
        AssertionError: with what each rank that failed says, as one's failure is often another's doing.
    """
    try:
        return _on_ranks(count, folder, function, args, "forkserver")
    except _Ended as signal:
        warnings.warn(f"ranks begin again: {signal}", stacklevel=2)
        return _on_ranks(count, folder, function, args, "spawn")


class _Ended(AssertionError):
    """By a signal."""


def _on_ranks(count: int, folder: Path, function: Callable, args: tuple, method: str) -> list[Any]:
    place = Path(tempfile.mkdtemp(dir=folder))
    try:
        server()
        torch.multiprocessing.start_processes(_rank, (count, place, function, args), nprocs=count,
                                              start_method=method)
    except Exception as error:
        said = [f"{path.name}:\n{path.read_text()}" for path in sorted(place.glob("rank *"))]
        kind = _Ended if getattr(error, "signal_name", None) else AssertionError
        raise kind("\n".join([*said, str(error)[-2000:]])) from None
    return [torch.load(place / f"{rank}.pt", weights_only=False) for rank in range(count)]


def _rank(rank: int, count: int, place: Path, function: Callable, args: tuple) -> None:
    spare_time()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/found", rank=rank,
                            world_size=count, timeout=timedelta(minutes=3))
    with open(place / f"rank {rank}", "w") as said:
        faulthandler.enable(file=said)  # for a rank that a signal ends
        faulthandler.dump_traceback_later(150, file=said)  # of all threads, where it stands by then
        try:
            torch.save(function(rank, *args), place / f"{rank}.pt")
        except BaseException:
            said.write(traceback.format_exc()[-2000:])
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
        dist.barrier()  # who is still being asked stays
        dist.destroy_process_group()
