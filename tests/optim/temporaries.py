"""Bytes that a step of each optimizer holds beside its state, at each width of it.

    python tests/optim/temporaries.py [--elements 33554432] [--only AdamW] [--captured inductor]
                                      [--skip-nonfinite] [--transposed] [--linear]

One parameter, 1024 elements a row (a column, transposed), float32, or bfloat16 where it has a `weight_bits` (w). The step
measured is the second one: in eager, or a training step captured by backend "memopt", whose
backward only gives the gradient that it is given, or with --linear is that of a linear layer.
"""

from __future__ import annotations

import argparse
import functools

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
WIDTHS = [(32, None), (16, None), (8, None), (4, None), (1, None), (32, 16), (8, 16), (8, 24)]


def temporary_bytes(make, elements: int, bits: int, weight_bits: int | None,
                    lowering: str | None = None, transposed: bool = False, linear: bool = False) -> int:
    dtype = torch.float32 if weight_bits is None else torch.bfloat16
    weight = torch.randn(elements // 1024, 1024).to(dtype)
    p = torch.nn.Parameter(weight.t() if transposed else weight)
    opt = make([p], state_bits=bits, weight_bits=weight_bits)
    if lowering is not None:
        return captured_bytes(p, opt, lowering, linear)
    for _ in range(2):
        p.grad = torch.randn_like(p)  # AdamA takes it away
        result = memopt.measure(opt.step)
    return result.transient_peak_bytes


def captured_bytes(p: torch.nn.Parameter, opt: torch.optim.Optimizer, lowering: str, linear: bool = False) -> int:
    torch._dynamo.reset()

    def step(given):
        (torch.nn.functional.linear(given, p).square() if linear else p * given).sum().backward()
        opt.step()
        opt.zero_grad()

    compiled = torch.compile(step, backend="memopt", options={"lowering": lowering})
    given = torch.randn_like(p[:8] if linear else p)
    compiled(given)
    return memopt.measure(compiled, given, resident=(p, opt)).transient_peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 25)
    parser.add_argument("--only", nargs="+", choices=MAKERS, default=list(MAKERS))
    parser.add_argument("--captured", choices=("inductor", "eager"), help="by this lowering")
    parser.add_argument("--skip-nonfinite", action="store_true", help="that setting of the optimizers")
    parser.add_argument("--transposed", action="store_true", help="the parameter is not contiguous")
    parser.add_argument("--linear", action="store_true", help="a linear layer's gradient, of 8 rows")
    given = parser.parse_args()
    print(f"MiB beside parameter, gradient and state; {given.elements} elements")
    print("optimizer " + "".join(f"{f'{bits} bits' + (f', w {w}' if w else ''):>14}"
                                 for bits, w in WIDTHS))
    for name in given.only:
        make = functools.partial(MAKERS[name], **{"skip_nonfinite": True} if given.skip_nonfinite else {})
        held = [temporary_bytes(make, given.elements, *width, given.captured, given.transposed,
                                 given.linear) / 2**20 for width in WIDTHS]
        print(f"{name:10}" + "".join(f"{mib:14.2f}" for mib in held), flush=True)


if __name__ == "__main__":
    main()
