"""Bits of model memory a parameter: what stays between steps, and what a captured step has at its peak.

    python tests/lpmm/bits.py [--layers 24] [--width 512] [--lowering eager]

Equal linear layers and one row of input, so that next to nothing is activations. Resident are
parameters, states and gradients, scales and counts included, measured; gradients in `.grad`, which are
there between micro-batches and not between steps, are added: "in .grad" is an ordinary loop, of which
`accumulate_in_backward` keeps the sum in 8 bits. Decoded are parameters in full precision: the most at once, in layers.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import memopt_compile as memopt

optim = memopt.optim


def sgdm(p, **bits):
    return optim.SGD(p, lr=0.01, momentum=0.9, **bits)


WAYS = {  # bits of parameters, optimizer, micro-batches
    "SGDM, 32/32/32": (32, lambda p: sgdm(p), 2),
    "SGDM, 12/8/8": (12, lambda p: sgdm(p, state_bits=8, gradient_bits=8), 2),
    "SGDM, 12/8/8 in .grad": (12, lambda p: sgdm(p, state_bits=8, gradient_bits=8), 2),
    "SGDM, 12/-/8": (12, lambda p: sgdm(p, state_bits=8), 1),
    "AdamW, 32/32/32/32": (32, lambda p: optim.AdamW(p), 2),
    "AdamW, 8/8/8/8": (8, lambda p: optim.AdamW(p, state_bits=8, gradient_bits=8), 2),
    "AdamW, 8/8/8/8 in .grad": (8, lambda p: optim.AdamW(p, state_bits=8, gradient_bits=8), 2),
    "AdamW, 8/-/8/8": (8, lambda p: optim.AdamW(p, state_bits=8), 1),
    "AdamA, 8/-/8/8": (8, lambda p: optim.AdamA(p, state_bits=8), 2),
}


def bits(name: str, layers: int, width: int, lowering: str) -> tuple[float, float, float]:
    width_of, make, n = WAYS[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    if width_of != 32:
        memopt.quantize_parameters_(model, bits=width_of)
    opt = make(model.parameters())
    kept = width_of == 32 or name.endswith("in .grad")
    if name.endswith("in .grad"):
        opt.accumulate_in_backward()

    def step(x):
        for some, in memopt.micro_batches(n, x):
            (model(some).square().mean() / n).backward()
            if n > 1 and not kept:
                opt.accumulate()
        opt.step()
        opt.zero_grad()

    run = torch.compile(step, backend="memopt", options={"lowering": lowering})
    x = torch.randn(n, width)
    run(x)
    memory = memopt.measure(run, x, resident=(model, opt))
    count = sum(p.numel() for p in model.parameters())
    gradient_bytes = 0
    if kept:  # between micro-batches
        model(x[:1]).square().mean().backward()
        gradients = [p.grad for p in model.parameters()]
        gradient_bytes = sum(part.nbytes for g in gradients for part in getattr(g, "parts", [g]))
    decoded = memopt.report(run).memory.most["decoded parameters"] / (4 * width * width)
    return 8 * (memory.resident_bytes + gradient_bytes) / count, 8 * memory.peak_bytes / count, decoded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--lowering", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--only", nargs="+", default=list(WAYS), metavar="NAME")
    given = parser.parse_args()
    print(f"| parameters/gradients/states | resident | at the peak, {given.lowering} | decoded at once, layers |\n|---|---|---|---|")
    for name in given.only:
        resident, peak, decoded = bits(name, given.layers, given.width, given.lowering)
        print(f"| {name} | {resident:.2f} | {peak:.2f} | {decoded:.2f} |", flush=True)


if __name__ == "__main__":
    main()
