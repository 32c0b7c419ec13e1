"""Work that takes long says what it is at: a line on stderr now and then, and none for what is soon done.

    memopt: train.py:31: planning for 5.21 GiB, plan_memory (17 s)
    memopt: train.py:31: lowering piece 7 of 24 (35 s)
    memopt: train.py:31: done in 58 s

The lines go to the logger `memopt_compile.progress` where logging has handlers, and stay away if its level is above INFO. Of a
process group rank 0 tells.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator

import torch.distributed as dist

log = logging.getLogger("memopt_compile.progress")
log.setLevel(logging.INFO)

SECONDS = 10.0  # between two lines, and before the first

_stages: list[str] = []  # the outermost first
_begun = _told = 0.0  # by the process's clock


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """What is being done until this ends, within the stages around it."""
    global _begun, _told
    if not _stages:
        _begun = _told = time.perf_counter()
    _stages.append(name)
    try:
        if (now := time.perf_counter()) - _told >= SECONDS:
            _told = now
            _tell(f"{_stages[0]}: {', '.join(_stages[1:])} ({now - _begun:.0f} s)" if _stages[1:] else _stages[0])
        yield
        if len(_stages) == 1 and _told > _begun:
            _tell(f"{name}: done in {time.perf_counter() - _begun:.0f} s")
    finally:
        _stages.pop()


def _tell(line: str) -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_rank():
        return
    if log.hasHandlers():
        log.info(line)
    elif log.isEnabledFor(logging.INFO):
        print(f"memopt: {line}", file=sys.stderr, flush=True)
