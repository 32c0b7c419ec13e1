"""Bytes a parameter at the peak of a step in micro-batches, parameters in bfloat16, states of 8 bits.

    python tests/optim/bytes_a_parameter.py [--layers 64] [--compiled inductor] [--only NAME ...]

Equal linear layers; the third step is measured. A micro-batch is one row, so that next to nothing
is activations, and all that is there at the peak is counted: parameters, states, gradients, batch.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import memopt_compile as memopt

optim = memopt.optim
WAYS = {
    "torch AdamW, gradients accumulated": lambda p, n: torch.optim.AdamW(p, foreach=False),
    "AdamA, 8 bits, weights of 16": lambda p, n: optim.AdamA(p, state_bits=8, weight_bits=16),
    "AdamA, 1 bit, weights of 16": lambda p, n: optim.AdamA(p, state_bits=1, weight_bits=16),
    "AdamA, 8 bits, weights of 24": lambda p, n: optim.AdamA(p, state_bits=8, weight_bits=24),
    "CAME, 8 bits, weights of 16": lambda p, n: optim.CAME(
        p, lr=1e-4, state_bits=8, weight_bits=16, micro_batches=n),
    "CAME, 8 bits, weights of 24": lambda p, n: optim.CAME(
        p, lr=1e-4, state_bits=8, weight_bits=24, micro_batches=n),
}


def bytes_a_parameter(make, layers: int, width: int, n: int, compiled: str | None) -> list[float]:
    """[at the peak, before the step]; in eager with hooks, or compiled with that lowering."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).bfloat16()
    opt = make(model.parameters(), n)
    folds = hasattr(opt, "accumulate")
    if folds and not compiled:
        opt.accumulate_in_backward()

    def step(x):
        for some, in memopt.micro_batches(n, x):
            (model(some).float().square().mean() / n).backward()
            if folds and compiled:
                opt.accumulate()
        opt.step()
        opt.zero_grad()

    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    run = torch.compile(step, backend="memopt", options={"lowering": compiled}) if compiled else step
    x = torch.randn(n, width).bfloat16()
    run(x)
    run(x)
    memory = memopt.measure(run, x, resident=(model, opt))
    if compiled:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    count = sum(p.numel() for p in model.parameters())
    return [b / count for b in (memory.peak_bytes, memory.resident_bytes)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--compiled", choices=("inductor", "eager"), help="this lowering")
    parser.add_argument("--only", nargs="+", default=list(WAYS), metavar="NAME")
    given = parser.parse_args()
    print(f"{given.layers} layers of {given.width} by {given.width}, N = {given.micro_batches}, "
          f"{given.compiled or 'eager, folded by hooks'}")
    for name in given.only:
        peak, before = bytes_a_parameter(WAYS[name], given.layers, given.width,
                                         given.micro_batches, given.compiled)
        print(f"{name:38} {peak:6.3f} at the peak, {before:6.3f} before", flush=True)


if __name__ == "__main__":
    main()
