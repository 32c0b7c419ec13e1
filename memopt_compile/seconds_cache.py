"""Measured seconds on disk, so that equal steps get equal plans from run to run.

A file of JSON for each device as it is set up, in the folder that `MEMOPT_CACHE_DIR` names or else
in the user's cache folder. What is on disk stays: of two processes that have measured the same
call the one that writes first is believed by both. A file that cannot be read counts as empty,
and one that cannot be written leaves its seconds to this process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import sys
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .compat.trace import float32_precision
from .devices import device_name

log = logging.getLogger("memopt_compile")

_unwritten: dict[Path, dict[str, float]] = {}  # by file, what could not be written


def folder() -> Path:
    """Where the files are: `MEMOPT_CACHE_DIR`, else the user's cache folder."""
    if given := os.environ.get("MEMOPT_CACHE_DIR"):
        return Path(given)
    home = Path(os.path.expanduser("~"))
    user = {"win32": os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local",
            "darwin": home / "Library" / "Caches"}.get(
        sys.platform, os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return Path(user if os.path.isabs(user) else tempfile.gettempdir()) / "memopt_compile"


def setup(device: torch.device) -> dict[str, Any]:
    """Everything beside the call that its seconds depend on, as far as it can be known."""
    found = {"device": device_name(device), "torch": str(torch.__version__),
             "float32": [float32_precision(device.type, kind) for kind in ("matmul", "conv")],
             "deterministic": torch.are_deterministic_algorithms_enabled()}
    if device.type == "cpu":
        found |= {"threads": torch.get_num_threads(),
                  "vectors": torch.backends.cpu.get_cpu_capability()}
    else:
        found["runtime"] = torch.version.cuda or torch.version.hip
    return found


@dataclass(frozen=True)
class SecondsCache:
    """The seconds of calls, by their text, that `path` has for this `setup`."""

    path: Path
    setup: Mapping[str, Any]

    @classmethod
    def of(cls, device: torch.device) -> SecondsCache:
        found = setup(device)
        digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]
        return cls(folder() / f"seconds-{device.type}-{digest}.json", found)

    def read(self) -> dict[str, float]:
        """What is known. Nothing of a file that is damaged, or of another setup."""
        try:
            stored = json.loads(self.path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            stored = None
        known = dict(_unwritten.get(self.path, {}))
        if isinstance(stored, dict) and stored.get("setup") == self.setup:
            calls = stored.get("seconds")
            known |= {call: seconds for call, seconds in (calls if isinstance(calls, dict) else {}).items()
                      if isinstance(seconds, float) and 0 < seconds < math.inf}
        return known

    def add(self, measured: Mapping[str, float]) -> dict[str, float]:
        """Write what was `measured` beside what is there; all that is known then.

        The file is replaced whole, so that no reader sees half of it.
        """
        known = {**measured, **self.read()}
        text = json.dumps({"setup": self.setup, "seconds": dict(sorted(known.items()))}, indent=1)
        part = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text, "utf-8")
            part.replace(self.path)
            _unwritten.pop(self.path, None)
        except OSError as error:
            if self.path not in _unwritten:
                log.warning("measured seconds are not kept for the next run: %s", error)
            _unwritten[self.path] = known
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        return known
