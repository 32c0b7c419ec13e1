"""Time of a captured step with parameters and states in few bits, as a ratio to full precision, in turn.

    python tests/lpmm/step_time.py [--rows 4096] [--width 512] [--layers 4] [--lowering inductor]

Linear layers and GELU. The update takes a time in proportion to the parameters, the rest in proportion to
parameters and rows: with more rows the ratio falls. Least and median time of the rounds, as ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

import memopt_compile as memopt

WAYS = {  # bits of parameters, optimizer
    "SGDM": (32, lambda p: memopt.optim.SGD(p, lr=0.01, momentum=0.9)),
    "SGDM, 12/-/8": (12, lambda p: memopt.optim.SGD(p, lr=0.01, momentum=0.9, state_bits=8)),
    "AdamW": (32, lambda p: memopt.optim.AdamW(p)),
    "AdamW, 8/-/8/8": (8, lambda p: memopt.optim.AdamW(p, state_bits=8)),
}


def compiled(way: str, given: argparse.Namespace):
    bits, make = WAYS[way]
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(given.layers) for m in (
        nn.Linear(given.width, given.width), nn.GELU())))
    if bits != 32:
        memopt.quantize_parameters_(model, bits)
    opt = make(model.parameters())

    def step(x):
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()

    return torch.compile(step, backend="memopt", options={"lowering": given.lowering})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in (("rows", 4096), ("width", 512), ("layers", 4), ("rounds", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lowering", choices=("eager", "inductor"), default="inductor")
    given = parser.parse_args()
    x = torch.randn(given.rows, given.width)
    steps, times = {way: compiled(way, given) for way in WAYS}, {way: [] for way in WAYS}
    for index in range(given.rounds + 2):
        for way, step in steps.items():
            begin = time.perf_counter()
            step(x)
            if index >= 2:
                times[way].append(time.perf_counter() - begin)
    print("| way | least | median |\n|---|---|---|")
    for way in WAYS:
        full = times[way.partition(",")[0]]
        print(f"| {way} | {min(times[way]) / min(full):.2f} | "
              f"{statistics.median(times[way]) / statistics.median(full):.2f} |")


if __name__ == "__main__":
    main()
