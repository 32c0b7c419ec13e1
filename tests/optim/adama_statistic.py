"""The statistic of Figure 4 of the AdamA paper: √v̂ / √v̂′ while the example's ResNet is trained.

    python tests/optim/adama_statistic.py [--steps 150] [--batch 128] [--told]

The training is AdamA's, with N micro-batches a mini-batch. v̂′ is its second moment, from the sum of
the micro-batches' squared gradients; v̂ is that of Adam, from the square of their sum, on the same
gradients. The bias corrections are equal and fall out: the coefficient is √v/√v′, by which AdamA's
step of an element is longer than Adam's. It is 1 where an element's gradients of the micro-batches
are uncorrelated over time, √N where they agree, and 0 where they cancel out.

--told trains with `micro_batches=N`, whose v is made to estimate Adam's.

For each N, over the steps: the mean over all elements, as the paper draws it, its value range, and
how many elements are within 1% of 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt_compile.optim import AdamA

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from data import fashion_mnist
from models import ResNet

COUNT = 20_000  # images, as in examples/train_resnet.py
BETA2 = 0.999


def coefficients(opt: AdamA, adams: dict[nn.Parameter, Tensor]) -> Tensor:
    """√v/√v′ of all elements that have had a gradient, a vector."""
    found = [(adams[p], opt.state[p]["exp_avg_sq"]) for p in adams]
    return torch.cat([(v / own).sqrt()[own > 0].flatten() for v, own in found])


def track(n: int, steps: int, lr: float, batch: int, told: bool) -> Tensor:
    """[steps, 7]: mean, min, 1%, median, 99%, max, share within 1% of 1, after each step."""
    torch.manual_seed(0)
    images, labels, _, _ = fashion_mnist()
    model = ResNet()
    opt = AdamA(model.parameters(), lr=lr, betas=(0.9, BETA2),
                micro_batches=n if told else 1)
    adams = {p: torch.zeros_like(p) for p in model.parameters()}
    batches = torch.randperm(COUNT).split(batch)[:-1]
    rows = []
    for i in range(steps):
        chosen = batches[i % len(batches)]
        total = {p: torch.zeros_like(p) for p in adams}
        for part in chosen.chunk(n):
            (F.cross_entropy(model(images[part]), labels[part]) / n).backward()
            for p in adams:
                total[p] += p.grad
            opt.accumulate()
        for p, v in adams.items():
            v.mul_(BETA2).addcmul_(total[p], total[p], value=1 - BETA2)
        opt.step()
        found = coefficients(opt, adams).sort().values
        at = [round(q * (len(found) - 1)) for q in (0, 0.01, 0.5, 0.99, 1)]
        near = ((found - 1).abs() <= 0.01).float().mean()
        rows.append(torch.stack([found.mean(), *found[at], near]))
    return torch.stack(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=128, help="images of a mini-batch")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--told", action="store_true", help="AdamA(micro_batches=N)")
    options = parser.parse_args()
    print(f"{options.steps} steps of {options.batch} images, lr {options.lr}\n")
    print("| N | after step | mean | min | 1% | median | 99% | max | within 1% of 1 |")
    print("|---|---|---|---|---|---|---|---|---|")
    for n in options.micro_batches:
        begin = time.perf_counter()
        rows = track(n, options.steps, options.lr, options.batch, options.told)
        shown = [s for s in (1, options.steps // 10, options.steps // 3, options.steps) if s > 0]
        for step in dict.fromkeys(shown):
            *values, near = rows[step - 1].tolist()
            print(f"| {n} | {step} |", *(f"{v:.3f} |" for v in values), f"{near:.1%} |")
        means = rows[:, 0]
        print(f"| {n} | all | {means.min():.3f} to {means.max():.3f} | {rows[:, 1].min():.3f} | "
              f"{rows[:, 2].min():.3f} | {rows[:, 3].min():.3f} to {rows[:, 3].max():.3f} | "
              f"{rows[:, 4].max():.3f} | {rows[:, 5].max():.3f} | {rows[:, 6].max():.1%} at most |")
        print(f"N = {n}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
