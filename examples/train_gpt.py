"""Train a character GPT on Shakespeare's plays, and compare the memory of three ways to run it.

    python examples/train_gpt.py --compare
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from common import BACKENDS, arguments, compiled, has_compiler, train
from data import random_batch, shakespeare
from models import GPT, GPTConfig
from tabulate import tabulate

ROUNDS, CALLS = 3, 5  # of timing: processes take turns, a few steps each turn


def parse() -> argparse.Namespace:
    parser = arguments(__doc__.splitlines()[0], steps=300)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--compare", action="store_true",
                        help="then measure eager, torch.compile and memopt, each in its process")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.layers, options.width, options.batch = 2, 48, 8
        options.sequence, options.steps = 32, min(options.steps, 30)
    return options


def prepare(options: argparse.Namespace, vocabulary: int):
    torch.manual_seed(options.seed)
    model = GPT(GPTConfig(vocabulary, options.layers, options.width, options.width // 32 or 1,
                          options.sequence))
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    rate = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: min(1, (i + 1) / 20) * (
        0.55 + 0.45 * math.cos(math.pi * min(1, i / max(1, options.steps)))))

    def step(tokens, targets):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return model, opt, rate, compiled(step, options)


def run(options: argparse.Namespace) -> None:
    ids, held_out, alphabet = shakespeare()
    model, opt, rate, step = prepare(options, len(alphabet))
    generator = torch.Generator().manual_seed(options.seed)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size:,} parameters, {len(ids):,} characters, backend {options.backend}", flush=True)
    train(step, lambda i: random_batch(ids, options.batch, options.sequence, generator),
          options.steps, rate.step)
    model.eval()
    with torch.no_grad():
        tokens, targets = random_batch(held_out, 32, options.sequence, generator)
        print(f"validation loss {F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()):.3f}")
    start = torch.tensor([[alphabet.index("\n")]])
    print("sample:", "".join(alphabet[i] for i in model.sample(start, 200)[0].tolist()), sep="\n")


def measure(options: argparse.Namespace) -> None:
    """One backend in this process: a JSON line of bytes, then one of seconds for every input line."""
    import memopt_compile as memopt

    ids, _, alphabet = shakespeare()
    model, opt, rate, step = prepare(options, len(alphabet))
    batch = random_batch(ids, options.batch, options.sequence, torch.Generator().manual_seed(0))
    start = time.perf_counter()
    step(*batch)
    first = time.perf_counter() - start
    for _ in range(2):
        step(*batch)
    seen = memopt.measure(step, *batch, resident=(model, opt))
    found = {"first": first, "peak": seen.peak_bytes, "transient": seen.transient_peak_bytes}
    if options.backend == "memopt":
        found["predicted"] = memopt.report(step).predicted_peak_bytes
    print(json.dumps(found), flush=True)
    for _ in sys.stdin:
        times = []
        for _ in range(CALLS):
            start = time.perf_counter()
            step(*batch)
            times.append(time.perf_counter() - start)
        print(json.dumps(times), flush=True)


def compare(options: argparse.Namespace) -> None:
    """Each backend in its own process; time in turns, so that all see the same machine."""
    command = [sys.executable, __file__, "--measure", *sys.argv[1:]]
    names = [b for b in BACKENDS[::-1] if b != "inductor" or has_compiler()]
    workers, found, times = {}, {}, {name: [] for name in names}
    for name in names:
        print(f"measuring {name} ...", flush=True)
        workers[name] = subprocess.Popen(
            [*command, "--backend", name], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        found[name] = _answer(workers[name], name)
    for _ in range(ROUNDS):
        for name in names:
            workers[name].stdin.write("\n")
            workers[name].stdin.flush()
            times[name] += _answer(workers[name], name)
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    best = min(found[n]["peak"] for n in names if n != "memopt")
    title = {"eager": "eager", "inductor": "torch.compile", "memopt": "memopt"}
    rows = []
    for name in names:
        seen, middle = found[name], sorted(times[name])[len(times[name]) // 2]
        predicted = seen.get("predicted")
        error = f"{100 * (predicted / seen['peak'] - 1):+.2f}%" if predicted else ""
        rows.append((title[name], f"{seen['peak'] / 2**20:.2f}", f"{seen['peak'] / best:.3f}",
                     f"{predicted / 2**20:.2f}" if predicted else "", error,
                     f"{middle * 1e3:.0f}", f"{seen['first']:.1f}"))
    print(tabulate(rows, ("", "peak MiB", "of the lower", "predicted MiB", "error",
                          "ms a step", "first call s"), disable_numparse=True, stralign="right"))
    print("peak: parameters, gradients, optimizer state and batch included, measured exactly")


def _answer(worker: subprocess.Popen, name: str):
    for line in worker.stdout:
        if line.startswith(("{", "[")):
            return json.loads(line)
    sys.exit(f"the process that measures {name} ended with status {worker.wait()}")


if __name__ == "__main__":
    chosen = parse()
    if chosen.measure:
        measure(chosen)
    else:
        run(chosen)
        if chosen.compare:
            compare(chosen)
