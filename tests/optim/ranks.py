"""Run a function on several ranks of real gloo processes."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def on_ranks(count: int, folder: Path, function: Callable, *args: Any) -> list[Any]:
    """What ``function(rank, *args)`` returns on each of `count` ranks.

    They find each other by a file in `folder`: there is no port to be taken. A rank that waits
    for another in vain fails after five minutes.

    Raises:
        AssertionError: with what each rank that failed says, as one's failure is often another's doing.
    """
    try:
        torch.multiprocessing.spawn(_rank, (count, str(folder), function, args), nprocs=count)
    except Exception as error:
        said = [f"{path.name}: {path.read_text()}" for path in sorted(folder.glob("rank *"))]
        raise AssertionError("\n".join(said) or str(error)) from None
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


def _rank(rank: int, count: int, folder: str, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/found", rank=rank,
                            world_size=count, timeout=timedelta(minutes=5))
    try:
        torch.save(function(rank, *args), Path(folder, f"{rank}.pt"))
    except BaseException:
        Path(folder, f"rank {rank}").write_text(traceback.format_exc()[-2000:])
        raise
    dist.barrier()  # who is still being asked stays
    dist.destroy_process_group()
