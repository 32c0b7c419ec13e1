"""Losses of the optimizers on a small GPT and a small ResNet, over seeds, as a table.

    python tests/optim/loss_curves.py [--model gpt|resnet] [--only NAME ...] [--seeds 3]
    python tests/optim/loss_curves.py --only CAME --rates 1e-3 2e-3 4e-3 --seeds 1 --first-seed 100

Every optimizer sees the same batches from the same first weights. What stands in for AdamW has its
rate, CAME and Adafactor those in `RATES`; or each is run with all of the rates given.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from data import fashion_mnist, random_batch, shakespeare  # noqa: E402
from models import GPT, GPTConfig, ResNet  # noqa: E402

import memopt_compile as memopt  # noqa: E402

optim = memopt.optim


@dataclass(frozen=True)
class Way:
    """An optimizer, the number of micro-batches that its mini-batch comes in, and the type of the parameters."""

    make: Callable[[Iterable], torch.optim.Optimizer]
    micro_batches: int = 1
    dtype: torch.dtype = torch.float32


def adama(n: int, **settings: Any) -> Way:
    return Way(partial(optim.AdamA, **settings), n)


def bfloat16(make: Callable, **settings: Any) -> Way:
    return Way(partial(make, **settings), dtype=torch.bfloat16)


WAYS = {
    "AdamW": Way(optim.AdamW),
    "AdamW, 8 bits": Way(partial(optim.AdamW, state_bits=8)),
    "AdamW, 4 bits": Way(partial(optim.AdamW, state_bits=4)),
    "AdamW, 1 bit": Way(partial(optim.AdamW, state_bits=1)),
    **{f"AdamW, N = {n}": Way(optim.AdamW, n) for n in (2, 4, 8)},
    **{f"AdamA, N = {n}": adama(n) for n in (2, 4, 8)},
    **{f"AdamA, N = {n}, v_scale = √N": adama(n, v_scale=n**0.5) for n in (2, 4, 8)},
    **{f"AdamA, N = {n}, micro_batches = N": adama(n, micro_batches=n) for n in (2, 4, 8)},
    "AdamA, N = 4, micro_batches = N, 8 bits": adama(4, micro_batches=4, state_bits=8),
    "CAME": Way(optim.CAME),
    "CAME, 8 bits": Way(partial(optim.CAME, state_bits=8)),
    "CAME, 1 bit": Way(partial(optim.CAME, state_bits=1)),
    **{f"CAME, β₃ = {beta}": Way(partial(optim.CAME, betas=(0.9, 0.999, beta))) for beta in (0.99, 0.999)},
    "Adafactor": Way(optim.Adafactor),
    **{f"{name}, bfloat16, weight_bits={bits}": bfloat16(getattr(optim, name), weight_bits=bits)
       for name in ("AdamW", "CAME") for bits in (None, 16, 24)},
}
# The best of a grid of factors of 2, one seed (100): docs/results/optimizers.md has the grids.
RATES = {"gpt": {"AdamW": 4e-3, "AdamA": 4e-3, "CAME": 2.5e-4, "Adafactor": 8e-2}, "resnet": {"CAME": 1e-3, "Adafactor": 1e-2}}


@dataclass(frozen=True)
class Task:
    """What is trained: a model, batches of it, and the loss on data that it has not seen."""

    build: Callable[[], torch.nn.Module]
    batch: Callable[[torch.Generator], tuple]
    loss: Callable[[torch.nn.Module, Any, Any], torch.Tensor]
    held_out: list[tuple]
    rate: float
    steps: int
    settings: dict[str, Any]


def gpt() -> Task:
    ids, rest, alphabet = shakespeare()
    generator = torch.Generator().manual_seed(0)
    return Task(
        lambda: GPT(GPTConfig(len(alphabet), 4, 128, 4, 64)),
        lambda g: random_batch(ids, 16, 64, g),
        lambda model, x, y: F.cross_entropy(model(x).float().flatten(0, 1), y.flatten()),
        [random_batch(rest, 64, 64, generator) for _ in range(8)], 2e-3, 400,
        {"weight_decay": 0.1})


def resnet() -> Task:
    images, labels, test_images, test_labels = fashion_mnist()
    def batch(generator: torch.Generator) -> tuple:
        rows = torch.randint(len(images), (64,), generator=generator)
        return images[rows], labels[rows]
    return Task(lambda: ResNet((8, 16)), batch,
                lambda model, x, y: F.cross_entropy(model(x), y),
                list(zip(test_images[:2000].split(500), test_labels[:2000].split(500))),
                2e-3, 300, {"weight_decay": 0.01})


def train(task: Task, way: Way, seed: int, rate: float, every: int) -> list[float]:
    """Losses on held-out data after every `every` steps."""
    torch.manual_seed(seed)
    model = task.build().to(way.dtype)
    opt = way.make(model.parameters(), lr=rate, **task.settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda i: min(1.0, (i + 1) / 20) * (1 - 0.9 * i / task.steps))
    generator, n, losses = torch.Generator().manual_seed(seed), way.micro_batches, []
    for i in range(1, task.steps + 1):
        for chunk in memopt.micro_batches(n, *task.batch(generator)):
            (task.loss(model, *chunk) / n).backward()
            if isinstance(opt, optim.AdamA):
                opt.accumulate()
        opt.step()
        opt.zero_grad()
        schedule.step()
        if i % every == 0:
            model.eval()
            with torch.no_grad():
                losses.append(statistics.fmean(
                    task.loss(model, x, y).item() for x, y in task.held_out))
            model.train()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("gpt", "resnet"), default="gpt")
    parser.add_argument("--only", nargs="+", default=list(WAYS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rates", type=float, nargs="+")
    given = parser.parse_args()
    torch.set_num_threads(1)
    task = {"gpt": gpt, "resnet": resnet}[given.model]()
    every = task.steps // 4
    print("| optimizer | rate |", " | ".join(f"step {i * every}" for i in range(1, 5)),
          "| over the first, by seed | mean |\n|---|---|---|---|---|---|---|---|")
    base: list[float] = []
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    runs_wanted = [(name, rate) for name in given.only for rate in given.rates or [
        RATES[given.model].get(name.split(",")[0], task.rate)]]
    for name, rate in runs_wanted:
        runs = [train(task, WAYS[name], seed, rate, every) for seed in seeds]
        last = [run[-1] for run in runs]
        base = base or last
        over = [a - b for a, b in zip(last, base)]
        print(f"| {name} | {rate:g} |",
              " | ".join(f"{statistics.fmean(at):.3f}" for at in zip(*runs)), "|",
              ", ".join(f"{d:+.3f}" for d in over), f"| {statistics.fmean(over):+.3f} |", flush=True)


if __name__ == "__main__":
    main()
