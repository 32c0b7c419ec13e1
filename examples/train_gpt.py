"""Train a character GPT on Shakespeare's plays, and compare the memory of three ways to run it.

    python examples/train_gpt.py --compare
    torchrun --nproc-per-node 2 examples/train_gpt.py --zero 3

The step below is ordinary PyTorch; `compiled` in common.py is the only place that
knows memopt; `memopt.micro_batches` works without it too.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import torch
import torch.nn.functional as F
from common import arguments, compiled, ranks, train
from data import random_batch, shakespeare
from models import GPT, GPTConfig

import memopt_compile as memopt
from memopt_compile.bench import answer, compare


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = arguments("Train a character GPT on Shakespeare's plays.", steps=200)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--micro-batches", type=int, default=1,
                        help="chunks of the batch whose gradients are added up before the update")
    parser.add_argument("--accumulate", choices=("gradients", "optimizer_states"), default="gradients",
                        help="what they are added up in; optimizer_states is AdamA")
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=0,
                        help="stage of ZeRO, under torchrun: the model is shared by its processes")
    options = parser.parse_args(given)
    if options.zero and (options.compare or options.measure or options.backend != "memopt"):
        parser.error("--zero trains with memopt, and compares nothing")
    if options.quick:
        options.layers, options.width, options.batch, options.sequence = 2, 64, 8, 32
        options.steps = min(options.steps, 30)
    return options


def prepare(options: argparse.Namespace, vocabulary: int):
    """The model, its optimizer and schedule, and one training step of them."""
    torch.manual_seed(options.seed)
    heads = max(1, options.width // 32)
    model = GPT(GPTConfig(vocabulary, options.layers, options.width, heads, options.sequence))
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.99), weight_decay=0.1)

    def warmup_then_cosine(i: int) -> float:
        done = min(1.0, i / options.steps)
        return min(1.0, (i + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * done))

    schedule = torch.optim.lr_scheduler.LambdaLR(opt, warmup_then_cosine)

    def step(tokens, targets):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    def accumulating_step(tokens, targets):
        total = 0.0
        for xs, ys in memopt.micro_batches(options.micro_batches, tokens, targets):
            loss = F.cross_entropy(model(xs).flatten(0, 1), ys.flatten()) / options.micro_batches
            loss.backward()
            total = total + loss.detach()
        opt.step()
        opt.zero_grad()
        return total

    return model, opt, schedule, step if options.micro_batches == 1 else accumulating_step


def run(options: argparse.Namespace, rank: int = 0, mesh: Any = None) -> None:
    ids, held_out, alphabet = shakespeare()
    model, opt, schedule, step = prepare(options, len(alphabet))
    size = sum(p.numel() for p in model.parameters())
    if mesh is not None:
        memopt.shard_(model, opt, mesh, stage=options.zero)
    step = compiled(step, options)
    print(f"{size:,} parameters, {len(ids):,} characters to learn from, "
          f"backend {options.backend}", flush=True)
    generator = torch.Generator().manual_seed(options.seed + rank)  # each rank reads other samples
    train(step, lambda i: random_batch(ids, options.batch, options.sequence, generator),
          options.steps, schedule.step)
    model.eval()
    with torch.no_grad():
        tokens, targets = random_batch(held_out, 64, options.sequence, generator)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    print(f"validation loss {loss:.3f}")
    torch.manual_seed(options.seed)
    start = torch.tensor([[alphabet.index("\n")]])
    written = model.sample(start, 40 if options.quick else 300)[0].tolist()
    print("sample:", "".join(alphabet[i] for i in written).strip(), "", sep="\n", flush=True)


def small():
    """A step and its arguments, for `python -m memopt_compile explain`."""
    options = parse(["--quick"])
    tokens = torch.zeros(options.batch, options.sequence, dtype=torch.long)
    return prepare(options, vocabulary=80)[-1], (tokens, tokens)


def measured(options: argparse.Namespace) -> None:
    """What `compare` runs in a process of its own for each backend."""
    ids, _, alphabet = shakespeare()
    model, opt, _, step = prepare(options, len(alphabet))
    batch = random_batch(ids, options.batch, options.sequence, torch.Generator().manual_seed(0))
    answer(compiled(step, options), batch, options.measure, (model, opt))


if __name__ == "__main__":
    options = parse()
    if options.measure:
        measured(options)
    else:
        with ranks(options.zero) as (rank, mesh):
            run(options, rank, mesh)
        if options.compare:
            share = 0.75 if options.quick else 0.5  # of a small model less is refused
            compare([sys.executable, *sys.argv], share=None if options.budget else share, svg=options.svg)
