"""Bytes that an eager step of each optimizer holds beside its state, at each width of it.

    python tests/optim/temporaries.py [--elements 33554432]

One parameter, 1024 elements a row, float32, or bfloat16 where it has a `weight_bits` (w). The step
measured is the second one.
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
WIDTHS = [(32, None), (16, None), (8, None), (4, None), (32, 16), (8, 16), (8, 24)]


def temporary_bytes(make, elements: int, bits: int, weight_bits: int | None) -> int:
    dtype = torch.float32 if weight_bits is None else torch.bfloat16
    p = torch.nn.Parameter(torch.randn(elements // 1024, 1024).to(dtype))
    opt = make([p], state_bits=bits, weight_bits=weight_bits)
    for _ in range(2):
        p.grad = torch.randn_like(p)  # AdamA takes it away
        result = memopt.measure(opt.step)
    return result.transient_peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 25)
    elements = parser.parse_args().elements
    print(f"MiB beside parameter, gradient and state; {elements} elements")
    print("optimizer " + "".join(f"{f'{bits} bits' + (f', w {w}' if w else ''):>14}"
                                 for bits, w in WIDTHS))
    for name, make in MAKERS.items():
        held = [temporary_bytes(make, elements, *width) / 2**20 for width in WIDTHS]
        print(f"{name:10}" + "".join(f"{mib:14.2f}" for mib in held), flush=True)


if __name__ == "__main__":
    main()
