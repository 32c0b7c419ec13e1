"""The first call of the README's GPT by depth and by micro-batches: how it grows, with its spread.

    python tests/backends/first_calls.py [--rounds 3] [--backend memopt]

Each call in a process of its own with an empty compilation cache, the sizes in turns: one call by itself
differs by a quarter from the next on a machine that others use.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tabulate import tabulate

GPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"
SIZES = [(4, 1), (12, 1), (24, 1), (4, 16)]  # layers, micro-batches; the first is what others are held to


def seconds(backend: str, layers: int, micro_batches: int) -> float:
    command = [sys.executable, GPT, "--measure", backend,
               "--layers", str(layers), "--micro-batches", str(micro_batches)]
    with tempfile.TemporaryDirectory() as cache:
        ran = subprocess.run(command, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True,
                             env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache})
    return json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("{")))["first"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", default="memopt")
    given = parser.parse_args()
    found: dict[tuple[int, int], list[float]] = {size: [] for size in SIZES}
    for i in range(given.rounds):
        for size in SIZES:
            found[size].append(seconds(given.backend, *size))
            print(f"round {i + 1}: {size[0]} layers, {size[1]} micro-batches: {found[size][-1]:.1f} s", flush=True)
    first = statistics.median(found[SIZES[0]])
    print(tabulate([(*size, f"{min(s):.1f}", f"{statistics.median(s):.1f}", f"{max(s):.1f}",
                     f"{statistics.median(s) / first:.2f}") for size, s in found.items()],
                   ("layers", "micro-batches", "least s", "median s", "most s", "of the first"),
                   disable_numparse=True))


if __name__ == "__main__":
    main()
