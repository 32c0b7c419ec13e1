"""Peak of a step of BERT-Large's shape in micro-batches: eager's measured, memopt's planned.

    python tests/optim/bert_peak.py [--layers 24] [--micro-batches 8] [--sequence 128] [--run]

A mini-batch of one sequence a micro-batch, AdamW, float32, dropout as configured. Eager PyTorch runs
two steps and the second is measured; memopt plans its step for the eager lowering, and with --run
compiles it for Inductor and runs it too, measured by the report. Needs 8 GB of memory.
"""

from __future__ import annotations

import argparse
import os
import warnings

import torch
import transformers

import memopt_compile as memopt

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # each measurement would print two lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--run", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    n, shape = given.micro_batches, (given.micro_batches, given.sequence)
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(
        hidden_size=given.width, intermediate_size=4 * given.width,
        num_hidden_layers=given.layers, num_attention_heads=given.width // 64))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(ids, labels):
        total = 0.0
        for tokens, wanted in memopt.micro_batches(n, ids, labels):
            loss = model(input_ids=tokens, labels=wanted).loss / n
            loss.backward()
            total = total + loss.detach()
        opt.step()
        opt.zero_grad()
        return total

    batch = torch.randint(1000, 30000, shape), torch.randint(1000, 30000, shape)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    peaks = {}

    def show(way: str, peak: int) -> None:
        peaks[way] = peak
        print(f"{way:45s} {peak / 2**30:7.3f} GiB  {peak / peaks['eager, AdamW']:.3f}", flush=True)

    step(*batch)
    show("eager, AdamW", memopt.measure(step, *batch, resident=(model, opt)).peak_bytes)
    for accumulate in ("gradients", "optimizer_states"):
        plan = memopt.explain(step, *batch, accumulate=accumulate, lowering="eager")
        show(f"memopt planned, {accumulate}", plan.predicted_peak_bytes or 0)
        if given.run:
            torch.compiler.reset()
            compiled = memopt.compile(step, accumulate=accumulate)
            compiled(*batch)
            report = memopt.report(compiled)
            show(f"memopt on Inductor, predicted, {accumulate}", report.predicted_peak_bytes or 0)
            show(f"memopt on Inductor, measured, {accumulate}", report.measured_peak_bytes or 0)


if __name__ == "__main__":
    main()
