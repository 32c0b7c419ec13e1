"""Validation losses of a GPT on Shakespeare with its activations compressed, over seeds, as a table.

    python tests/coverage/compressed_losses.py [--only WAY ...] [--steps 2000] [--seeds 3]

Nothing runs again, and the budget is the smallest that compression alone can keep: every activation
for which there is a format is in it. "plain int4" is one scale for each token in the place of the
formats of 4 bits: what the others are compared with, and no option of memopt.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from data import random_batch, shakespeare  # noqa: E402
from models import GPT, GPTConfig  # noqa: E402

import memopt_compile as memopt  # noqa: E402
from memopt_compile.quantization import activations  # noqa: E402
from memopt_compile.quantization.named import FORMATS  # noqa: E402

WAYS = {"exact": None, "int8": "int8", "int4": "int4", "plain int4": "int4"}


@dataclass(frozen=True)
class Tokens(activations.Groups):
    """4 bits with one scale for each row."""

    def unit(self, columns: int) -> int:
        return 1

    def encode(self, rows: Tensor, shared: list[Tensor]) -> list[Tensor]:
        return activations._quantized(rows.view(len(rows), 2, -1), (1, 2), 4, False)


PLAIN = dict.fromkeys(("int4", "int4 outliers", "int4 channels", "int4 offset"), Tokens(0.15))


def train(way: str, seed: int, steps: int) -> tuple[float, str]:
    """The loss on held-out plays after training, and what became of the activations."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    ids, rest, alphabet = shakespeare()
    generator = torch.Generator().manual_seed(0)
    held_out = [random_batch(rest, 64, 64, generator) for _ in range(16)]
    model = GPT(GPTConfig(len(alphabet), 4, 128, 4, 64))
    opt = torch.optim.AdamW(model.parameters(), lr=torch.tensor(2e-3), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda i: min(1.0, (i + 1) / 20) * (1 - 0.9 * i / steps))

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    generator = torch.Generator().manual_seed(seed)
    options: dict = {"lowering": "eager", "recompute": False, "compress": WAYS[way]}
    with mock.patch.dict(FORMATS, PLAIN) if "plain" in way else contextlib.nullcontext():
        if WAYS[way]:
            least = memopt.explain(step, *random_batch(ids, 16, 64, generator), memory_budget=[1],
                                   **options)
            options["memory_budget"] = least.points[0].peak_bytes
        compiled = memopt.compile(step, **options)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            compiled(*random_batch(ids, 16, 64, generator))
            schedule.step()
    report = memopt.report(compiled)
    model.eval()
    with torch.no_grad():
        loss = statistics.fmean(F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
                                for x, y in held_out)
    kept = report.measured_peak_bytes - report.resident_bytes
    return loss, f"{kept / 2**20:.2f} MiB; {report.plan or 'no plan'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    base: list[float] = []
    print("| activations | losses by seed | mean | over the first | beyond the inputs |")
    print("|---|---|---|---|---|")
    for way in given.only:
        found = [train(way, seed, given.steps) for seed in range(given.seeds)]
        losses = [loss for loss, _ in found]
        base = base or losses
        over = statistics.fmean(losses) / statistics.fmean(base) - 1
        print(f"| {way} | {', '.join(f'{loss:.4f}' for loss in losses)} | "
              f"{statistics.fmean(losses):.4f} | {over:+.2%} | {found[0][1]} |", flush=True)


if __name__ == "__main__":
    main()
