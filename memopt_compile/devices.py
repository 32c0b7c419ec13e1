"""What the device has: free bytes, and a budget in bytes from what the user wrote."""

from __future__ import annotations

from pathlib import Path

import torch

from .errors import OptionError
from .options import parse_bytes

# Left free by memory_budget="auto": the allocator's rounding, library workspaces and whatever
# else the process does. Stated in docs, so that "auto" can be repeated by hand.
RESERVE_SHARE = 0.1


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
