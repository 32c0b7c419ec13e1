"""What AdamA saves beside ZeRO, and the largest model that fits: the tables of AdamA's paper, by plans.

    python tests/zero/largest_models.py
    python tests/zero/largest_models.py --largest --dtype bfloat16 [--alone]

The first plans a BERT of 48 layers of width 2560 (3.9 billion parameters) on 8 ranks: optimizer states in
parts (P_os, stage 1), gradients too (P_os+g, stage 2), and stage 1 with AdamA. The second finds, for the
memory of three machines, how many layers of one width fit with P_os on 8 ranks (`--alone`: without ZeRO), with
gradients added up and with AdamA. Each is planned from steps of three depths (`memopt.explain_layers`), for the eager lowering.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import torch
import transformers

import memopt_compile as memopt
from memopt_compile.reporting.layered import LayeredReport

RANKS, MICRO_BATCHES, TOKENS = 8, 8, 128
WAYS = {  # stage (0: every rank for itself), and where micro-batches add up
    "gradients added up": (0, "gradients"),
    "AdamA": (0, "optimizer_states"),
    "P_os": (1, "gradients"),
    "P_os+g": (2, "gradients"),
    "P_os + AdamA": (1, "optimizer_states"),
}
MACHINES = {  # GiB of one GPU, width of a layer, and billions of parameters in the paper, by way
    "DGX-1": (16, 2048, (1.4, 1.8, 1.1, 3.3)),
    "DGX-2": (32, 3072, (3.0, 4.0, 2.5, 6.8)),
    "DGX A100": (80, 5120, (7.6, 9.6, 5.8, 18.2)),
}


def bert(width: int, layers: int) -> torch.nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64))


def maker(width: int, sequences: int, stage: int, mesh: object) -> Callable[[int], tuple]:
    def make(layers: int) -> tuple:
        model = bert(width, layers)
        opt = torch.optim.AdamW(model.parameters())
        if stage:
            memopt.shard_(model, opt, mesh, stage=stage)

        def step(ids, labels):
            for tokens, wanted in memopt.micro_batches(MICRO_BATCHES, ids, labels):
                (model(input_ids=tokens, labels=wanted).loss / MICRO_BATCHES).backward()
            opt.step()
            opt.zero_grad()

        batch = torch.zeros(MICRO_BATCHES * sequences, TOKENS, dtype=torch.long)
        return step, (batch, batch)

    return make


def planned(way: str, width: int, layers: int, sequences: int,
            depths: tuple[int, ...] = (2, 3, 4)) -> LayeredReport:
    stage, accumulate = WAYS[way]
    torch.compiler.reset()
    with memopt.planned_ranks(RANKS) as mesh:
        return memopt.explain_layers(maker(width, sequences, stage, mesh), layers, depths, zero=stage,
                                     accumulate=accumulate, lowering="eager")


def parameters(width: int, layers: int) -> int:
    with torch.device("meta"):
        one, two = (sum(p.numel() for p in bert(width, count).parameters()) for count in (1, 2))
    return one + (layers - 1) * (two - one)


def savings(sequences: int) -> None:
    print(f"{parameters(2560, 48):,} parameters, {sequences} sequences a micro-batch\n\n"
          "| way | peak, GB | between steps | AdamA needs less by |\n|---|---|---|---|")
    plans = {way: planned(way, 2560, 48, sequences) for way in ("P_os + AdamA", "P_os", "P_os+g")}
    least = plans["P_os + AdamA"].predicted_peak_bytes
    for way, plan in plans.items():
        print(f"| {way} | {plan.predicted_peak_bytes / 1e9:.2f} | {plan.resident_bytes / 1e9:.2f} "
              f"| {(plan.predicted_peak_bytes - least) / 1e9:.2f} |", flush=True)


def largest(sequences: int, alone: bool, machines: list[str], depths: tuple[int, ...]) -> None:
    print("| machine | way | layers | parameters | the paper's |\n|---|---|---|---|---|")
    ways = ("gradients added up", "AdamA") if alone else ("P_os", "P_os + AdamA")
    for machine in machines:
        gib, width, paper = MACHINES[machine]
        reported = paper[:2] if alone else paper[2:]
        counts = []
        for way, of_paper in zip(ways, reported):
            plan = planned(way, width, depths[-1], sequences, depths)
            left = gib * 2**30 - plan.predicted_peak_bytes
            layers = plan.layers + left // sum(plan.a_layer.values())
            counts.append(parameters(width, layers))
            print(f"| {machine}, {gib} GiB, width {width} | {way} | {layers} | {counts[-1] / 1e9:.2f}B "
                  f"| {of_paper}B |", flush=True)
        print(f"| | times as large | | {counts[1] / counts[0]:.2f} | {reported[1] / reported[0]:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="The tables of AdamA's paper, planned by shape.")
    parser.add_argument("--largest", action="store_true")
    parser.add_argument("--alone", action="store_true", help="the largest without ZeRO")
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=list(MACHINES))
    parser.add_argument("--depths", type=int, nargs=3, default=[4, 5, 6], help="that the largest are planned from")
    parser.add_argument("--sequences", type=int, help="a rank and micro-batch; of 128 tokens")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_default_dtype(getattr(torch, given.dtype))
    if given.largest:
        largest(given.sequences or 4, given.alone, given.machines, tuple(given.depths))
    else:
        savings(given.sequences or 8)


if __name__ == "__main__":
    main()
