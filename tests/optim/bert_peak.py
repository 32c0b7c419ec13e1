"""Peak of a step of BERT's shape in micro-batches: eager's measured, memopt's planned.

    python tests/optim/bert_peak.py [--ways NAME ...] [--layers 24] [--run LOWERING]

The shape is BERT-Large's: AdamW, float32, dropout as configured, micro-batches of one sequence. Eager
PyTorch runs two steps and the second is measured; memopt plans its step for the eager lowering, and
with --run compiles it and runs it too, measured by the report. Needs 8 GB of memory. With --budget memopt's step is
held to this many bytes by computing again, and the seconds that this adds by the cost model are printed.

Layers are alike: with two counts of --layers and --extend 24, peaks of 24 are those on the line
through the peaks of both.

    python tests/optim/bert_peak.py --width 2560 --layers 1 2 --extend 48 --sequences 8 --ways ..
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Iterator

import torch
import transformers

import memopt_compile as memopt

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # each measurement would print two lines

# (optimizer, what `accumulate` is if it is planned and not measured)
WAYS = {
    "eager, foreach": (lambda p: torch.optim.AdamW(p, foreach=True), None),
    "eager": (lambda p: torch.optim.AdamW(p), None),
    "gradients": (lambda p: torch.optim.AdamW(p), "gradients"),
    "AdamA": (lambda p: torch.optim.AdamW(p), "optimizer_states"),
    "AdamA, 8 bits": (lambda p: memopt.optim.AdamA(p, state_bits=8), "gradients"),
}


def peaks(way: str, layers: int, given: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """(how it was found, bytes) of a model with so many layers."""
    n = given.micro_batches
    shape = n * given.sequences, given.sequence
    torch.manual_seed(0)
    torch.compiler.reset()
    model = transformers.BertForMaskedLM(transformers.BertConfig(
        hidden_size=given.width, intermediate_size=4 * given.width,
        num_hidden_layers=layers, num_attention_heads=given.width // 64))
    make, accumulate = WAYS[way]
    opt = make(model.parameters())

    def step(ids, labels):
        total = 0.0
        for tokens, wanted in memopt.micro_batches(n, ids, labels):
            loss = model(input_ids=tokens, labels=wanted).loss / n
            loss.backward()
            if isinstance(opt, memopt.optim.AdamA):
                opt.accumulate()
            total = total + loss.detach()
        opt.step()
        opt.zero_grad()
        return total

    batch = torch.randint(1000, 30000, shape), torch.randint(1000, 30000, shape)
    if accumulate is None:
        step(*batch)
        yield "measured", memopt.measure(step, *batch, resident=(model, opt)).peak_bytes
        return
    plan = memopt.explain(step, *batch, accumulate=accumulate, lowering="eager", memory_budget=given.budget)
    if plan.plan:
        print(f"{way:15} computed again: {plan.plan.seconds:.3f} s more", flush=True)
    yield "planned", plan.predicted_peak_bytes or 0
    if given.run:
        compiled = memopt.compile(step, accumulate=accumulate, lowering=given.run,
                                  memory_budget=given.budget)
        compiled(*batch)
        report = memopt.report(compiled)
        yield f"{given.run}, predicted", report.predicted_peak_bytes or 0
        yield f"{given.run}, measured", report.measured_peak_bytes or 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS)[:4], metavar="NAME",
                        help=", ".join(WAYS))
    parser.add_argument("--layers", type=int, nargs="+", default=[24])
    parser.add_argument("--extend", type=int)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=1, help="of a micro-batch")
    parser.add_argument("--sequence", type=int, default=128, help="tokens")
    parser.add_argument("--budget", help="such as 5GiB")
    parser.add_argument("--run", choices=("eager", "inductor"))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    for way in given.ways:
        found = [dict(peaks(way, layers, given)) for layers in given.layers]
        for how in found[0]:
            sizes = dict(zip(given.layers, (peak[how] for peak in found)))
            if given.extend:
                (a, low), (b, high) = sizes.items()
                sizes[given.extend] = low + (high - low) * (given.extend - a) // (b - a)
            print(f"{way:15} {how:20}", *(f"{layers} layers {size / 2**30:8.3f} GiB"
                                         for layers, size in sizes.items()), flush=True)


if __name__ == "__main__":
    main()
