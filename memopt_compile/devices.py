"""What the device has: its name, free bytes, a budget in bytes from what the user wrote, the heap."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path

import torch

from .errors import OptionError
from .options import parse_bytes

# Left free by memory_budget="auto": the allocator's rounding, library workspaces and whatever
# else the process does. Stated in docs, so that "auto" can be repeated by hand.
RESERVE_SHARE = 0.1

# glibc's names for what `keep_freed_bytes` sets, and its defaults (mallopt(3)).
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
_DEFAULT, _LARGEST_MMAP, _LARGEST_INT = 128 * 2**10, 32 * 2**20, 2**31 - 1
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_kept_bytes = 0


def free_bytes(device: torch.device) -> int:
    """Bytes that the device could still give to this process."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if device.type == "cpu" and meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise OptionError(f"the free memory of {device} is not known", where="memory_budget='auto'",
                      do="give the budget in bytes, such as '6GiB'")


@functools.cache
def device_name(device: torch.device) -> str:
    """The maker's name of the device, as far as the system tells it."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if device.type == "cpu" and cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() if device.type == "cpu" else device.type


def budget_bytes(budget: int | float | str, unoptimized_peak_bytes: int,
                 device: torch.device, resident_bytes: int = 0) -> int:
    """The budget in bytes of peak.

    A float is a share of the peak of the captured step before any pass; "auto" is what the
    device has free besides the step's own `resident_bytes`, less `RESERVE_SHARE` of it.
    """
    if budget == "auto":
        return int((free_bytes(device) + resident_bytes) * (1 - RESERVE_SHARE))
    if isinstance(budget, float):
        return int(budget * unoptimized_peak_bytes)
    return parse_bytes(budget) if isinstance(budget, str) else budget


def keep_freed_bytes(transient_bytes: int) -> bool:
    """Let the heap keep the `transient_bytes` that a step on the CPU frees for the next step, as
    PyTorch's allocator does on a GPU. Whether it could be done.

    The threshold is twice as much: there are gaps in a heap, and to be just above it means to
    give back everything.

    glibc gives the free top of its heap back to the system. A step that frees all that it made is
    given every page anew, zeroed, in each call (see decision 0006). Nothing is done under another
    C library or where the environment already says what malloc shall do.
    """
    global _kept_bytes
    if transient_bytes <= _kept_bytes:
        return True
    if any(name in os.environ for name in _SETTINGS):
        return False
    done = _mallopt(min(2 * transient_bytes, _LARGEST_INT), _LARGEST_MMAP)
    _kept_bytes = transient_bytes if done else _kept_bytes
    return done


def give_freed_bytes_back() -> None:
    """Undo `keep_freed_bytes`: glibc's default thresholds again."""
    global _kept_bytes
    if _kept_bytes:
        _mallopt(_DEFAULT, _DEFAULT)
    _kept_bytes = 0


def _mallopt(trim_threshold: int, mmap_threshold: int) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    return bool(mallopt and mallopt(TRIM_THRESHOLD, trim_threshold)
                and mallopt(MMAP_THRESHOLD, mmap_threshold))
