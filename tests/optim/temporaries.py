"""Bytes that an eager step of each optimizer holds beside its state, at each width of it.

    python tests/optim/temporaries.py [--elements 33554432]

One parameter, 1024 elements a row, float32. The step measured is the second one.
"""

from __future__ import annotations

import argparse

import torch

import memopt_compile as memopt

MAKERS = {
    "SGD": lambda p, **kw: memopt.optim.SGD(p, lr=0.1, momentum=0.9, **kw),
    "Adam": lambda p, **kw: memopt.optim.Adam(p, amsgrad=True, weight_decay=0.1, **kw),
    "AdamW": lambda p, **kw: memopt.optim.AdamW(p, **kw),
    "AdamA": lambda p, **kw: memopt.optim.AdamA(p, **kw),
    "CAME": lambda p, **kw: memopt.optim.CAME(p, lr=1e-3, weight_decay=0.1, **kw),
    "Adafactor": lambda p, **kw: memopt.optim.Adafactor(p, weight_decay=0.1, **kw),
}
WIDTHS = (32, 16, 8, 4)


def temporary_bytes(make, elements: int, bits: int) -> int:
    p = torch.nn.Parameter(torch.randn(elements // 1024, 1024))
    opt = make([p], state_bits=bits)
    for _ in range(2):
        p.grad = torch.randn_like(p)  # AdamA takes it away
        result = memopt.measure(opt.step)
    return result.transient_peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 25)
    elements = parser.parse_args().elements
    print(f"MiB beside parameter, gradient and state; {elements} elements")
    print("optimizer " + "".join(f"{bits:>4} bits" for bits in WIDTHS))
    for name, make in MAKERS.items():
        held = [temporary_bytes(make, elements, bits) / 2**20 for bits in WIDTHS]
        print(f"{name:10}" + "".join(f"{mib:9.2f}" for mib in held))


if __name__ == "__main__":
    main()
