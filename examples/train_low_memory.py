"""Train a character GPT with few bytes of gradients and optimizer state, and compare the ways.

    python examples/train_low_memory.py --optimizer came --state-bits 8 --micro-batches 8 --compare
    python examples/train_low_memory.py --optimizer adamw --state-bits 8 --parameter-bits 8

With `--parameter-bits` parameters too are in few bits all the time (docs/lpmm.md), and AdamW adds up the
micro-batches' gradients in 8.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F
from common import arguments, compiled, train
from data import random_batch, shakespeare
from models import GPT, GPTConfig

import memopt_compile as memopt
from memopt_compile.bench import answer, compare

RATES = {"adamw": 4e-3, "adama": 4e-3, "came": 2.5e-4, "adafactor": 8e-2}
WAYS = {
    title: ("--measure", title.partition(":")[0].replace("torch.compile", "inductor"), "--optimizer", name,
            "--state-bits", bits, "--parameter-bits", parameter_bits)
    for title, name, bits, parameter_bits in (
        ("eager: AdamW", "adamw", "32", "32"), ("torch.compile: AdamW", "adamw", "32", "32"),
        ("memopt: AdamW", "adamw", "32", "32"), ("memopt: AdamA", "adama", "32", "32"),
        ("memopt: AdamA, 8 bits", "adama", "8", "32"), ("memopt: CAME", "came", "32", "32"),
        ("memopt: CAME, 8 bits", "came", "8", "32"), ("memopt: Adafactor", "adafactor", "32", "32"),
        ("memopt: AdamW, all 8 bits", "adamw", "8", "8"), ("memopt: AdamA, all 8 bits", "adama", "8", "8"))
}


def parse() -> argparse.Namespace:
    parser = arguments("Train a character GPT in little memory.", steps=200)
    parser.add_argument("--optimizer", choices=RATES, default="adama")
    parser.add_argument("--state-bits", type=int, choices=(32, 16, 8, 4), default=32)
    parser.add_argument("--parameter-bits", type=int, choices=(32, 12, 10, 8), default=32)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="to compare")
    options = parser.parse_args()
    if options.quick:
        options.width, options.steps = 64, min(options.steps, 30)
    if options.parameter_bits != 32 and options.optimizer not in ("adamw", "adama"):
        parser.error("--parameter-bits is for adamw and adama")
    return options


def optimizer(model: torch.nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    name, settings = options.optimizer, {"lr": RATES[options.optimizer], "weight_decay": 0.1,
                                         "state_bits": options.state_bits}
    if name == "adama":
        return memopt.optim.AdamA(model.parameters(), micro_batches=options.micro_batches, **settings)
    if options.parameter_bits != 32:
        settings["gradient_bits"] = 8
    kind = {"adamw": memopt.optim.AdamW, "came": memopt.optim.CAME,
            "adafactor": memopt.optim.Adafactor}[name]
    return kind(model.parameters(), **settings)


def main() -> None:
    options = parse()
    ids, _, alphabet = shakespeare()
    torch.manual_seed(options.seed)
    heads = options.width // 32
    model = GPT(GPTConfig(len(alphabet), 2 if options.quick else 4, options.width, heads, 128))
    if options.parameter_bits != 32:
        memopt.quantize_parameters_(model, options.parameter_bits)
    opt = optimizer(model, options)
    warmup = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: min(1.0, (i + 1) / 20))
    n = options.micro_batches

    def step(tokens, targets):
        total = 0.0
        for xs, ys in memopt.micro_batches(n, tokens, targets):
            loss = F.cross_entropy(model(xs).flatten(0, 1), ys.flatten()) / n
            loss.backward()
            if options.optimizer == "adama" or options.parameter_bits != 32:
                opt.accumulate()  # the gradients enter the moments, or a sum in 8 bits, and are gone
            total = total + loss.detach()
        opt.step()
        opt.zero_grad()
        return total

    step = compiled(step, options)
    generator = torch.Generator().manual_seed(options.seed)
    shape = (8, 32) if options.quick else (16, 128)

    def batch(i: int):
        return random_batch(ids, *shape, generator)

    if options.measure:
        return answer(step, batch(0), options.measure, (model, opt))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {options.optimizer} with "
          f"{options.state_bits} bits, parameters of {options.parameter_bits}, {n} micro-batches, backend {options.backend}", flush=True)
    train(step, batch, options.steps, warmup.step)
    state = sum(v.nbytes for s in opt.state.values() for v in s.values() if torch.is_tensor(v))
    print(f"optimizer state {state / 2**20:.2f} MiB")
    if options.compare:
        compare([sys.executable, *sys.argv], {name: WAYS[name] for name in options.ways},
                svg=options.svg)


if __name__ == "__main__":
    main()
