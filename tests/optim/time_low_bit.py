"""Steps of memopt.optim.AdamW with 32, 16, 8 and 4 bits against torch's fused AdamW, in turn.

    python tests/optim/time_low_bit.py [--elements 33554432] [--ways eager captured] [--bits 8 4]

Prints the least and the median time of a step as ratios to torch's, in one process, and the bytes
of the states. ``captured`` are training steps captured by backend "memopt", whose backward does no
more than to give the gradient that the others have ready.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import memopt_compile as memopt


def contenders(elements: int, ways: list[str], widths: list[int]) -> dict:
    """A step and its optimizer by name, each with a parameter of its own, 1024 elements a row."""
    makers = {"torch fused": lambda p: torch.optim.AdamW(p, fused=True)}
    for bits in widths:
        makers[f"{bits} bits"] = lambda p, bits=bits: memopt.optim.AdamW(p, state_bits=bits)
    result = {}
    for name, make in makers.items():
        for way in ways if name != "torch fused" else ["eager"]:
            p = torch.nn.Parameter(torch.randn(elements // 1024, 1024))
            opt, grad = make([p]), torch.randn_like(p)
            if way == "eager":
                p.grad = grad
                result[f"{name}, {way}"] = opt.step, opt
            else:
                result[f"{name}, {way}"] = captured_step(p, grad, opt), opt
    return result


def captured_step(p: torch.nn.Parameter, grad: torch.Tensor, opt: torch.optim.Optimizer):
    """A step whose gradient is `grad`; no one asks for its loss, so that none is computed."""
    def step(grad):
        (p * grad).sum().backward()
        opt.step()
        opt.zero_grad()

    compiled = torch.compile(step, backend="memopt")
    return lambda: compiled(grad)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 25)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--ways", choices=("eager", "captured"), nargs="+", default=["eager"])
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 16, 8, 4])
    args = parser.parse_args()
    rivals = contenders(args.elements, args.ways, args.bits)
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for index in range(args.rounds + 2):
        for name, (step, _) in rivals.items():
            begin = time.perf_counter()
            step()
            if index >= 2:
                times[name].append(time.perf_counter() - begin)
    base = times["torch fused, eager"]
    print(f"{args.elements} elements, {torch.get_num_threads()} threads, "
          f"{min(base) * 1e3:.1f} ms for torch's fused step")
    for name, (_, opt) in rivals.items():
        least = min(times[name]) / min(base)
        median = statistics.median(times[name]) / statistics.median(base)
        size = sum(value.nbytes for state in opt.state.values() for value in state.values())
        print(f"{name:22} least {least:6.2f}  median {median:6.2f}  "
              f"{size / args.elements:.4f} bytes of state an element")


if __name__ == "__main__":
    main()
