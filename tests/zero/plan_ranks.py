"""What each of many ranks holds of a Llama of 70 billion parameters, planned by one process.

    python tests/zero/plan_ranks.py --ranks 64 1024
    python tests/zero/plan_ranks.py --resident [--master]

The first prints the peak of a training step a rank, by category: AdamW in float32, products in bfloat16
(autocast), one sequence of 4,096 tokens a rank, each layer checkpointed. `--layers` plans another
number of layers, and `--whole` traces all of them in place of `memopt.explain_layers`. The second
prints the bytes between steps beside ZeRO's formulas, for 2 to 1,024 ranks. With `--master` parameters are in
bfloat16, with the other 16 bits of a float32 among the optimizer's states, and nothing is cast.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import memopt_compile as memopt
from memopt_compile.options import format_bytes

SHAPE = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
         "num_key_value_heads": 8}
RANKS = (2, 4, 8, 64, 1024)


def make(mesh: Any, stage: int, layers: int, vocabulary: int, tokens: int, master: bool) -> tuple:
    """A step of a sharded Llama, as a script under torchrun would make it."""
    model = LlamaForCausalLM(LlamaConfig(
        **SHAPE, num_hidden_layers=layers, vocab_size=vocabulary, max_position_embeddings=tokens,
        use_cache=False))
    with warnings.catch_warnings(action="ignore"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    if master:
        opt = memopt.optim.AdamW(model.bfloat16().parameters(), lr=1e-4, weight_bits=32)
    else:
        opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    memopt.shard_(model, opt, mesh, stage=stage)

    def step(ids):
        with torch.autocast("cpu", torch.bfloat16, enabled=not master):
            logits = model(ids).logits
        loss = F.cross_entropy(logits[0, :-1].float(), ids[0, 1:])
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return step, (torch.zeros(1, tokens, dtype=torch.long),)


def parameters(given: argparse.Namespace) -> int:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=1, vocab_size=given.vocabulary))
    layer = sum(p.numel() for p in model.model.layers.parameters())
    return sum(p.numel() for p in model.parameters()) + (given.layers - 1) * layer


def resident(given: argparse.Namespace) -> None:
    """What `memopt.explain` says is there between steps: parameters and states. Each layer adds the same."""
    count = parameters(given)
    print(f"Ψ = {count:,} parameters\n\n| ranks | stage | resident bytes | formula | difference |\n"
          "|---|---|---|---|---|")
    for ranks in RANKS:
        for stage in (2, 3):
            held = []
            for layers in (1, 2):
                with memopt.planned_ranks(ranks) as mesh:
                    step, args = make(mesh, stage, layers, given.vocabulary, 64, given.master)
                    inputs = memopt.explain(step, *args, zero=stage, lowering="eager").inputs
                held.append(inputs["parameters"] + inputs["optimizer state"])
            bytes_ = held[0] + (given.layers - 1) * (held[1] - held[0])
            kept = 2 if given.master else 4
            formula = 12 * count / ranks if stage == 3 else kept * count + (12 - kept) * count / ranks
            print(f"| {ranks:,} | {stage} | {bytes_:,} | {formula:,.0f} | {bytes_ / formula - 1:+.2%} |", flush=True)


def peaks(given: argparse.Namespace) -> None:
    for ranks in given.ranks:
        start, processor = time.perf_counter(), time.process_time()
        with memopt.planned_ranks(ranks) as mesh:
            def made(layers, mesh=mesh):
                return make(mesh, given.stage, layers, given.vocabulary, given.tokens, given.master)

            if given.whole:
                step, args = made(given.layers)
                plan = memopt.explain(step, *args, zero=given.stage, lowering=given.lowering)
                at_peak = plan.memory.at_peak
            else:
                plan = memopt.explain_layers(made, given.layers, zero=given.stage, lowering=given.lowering)
                at_peak = plan.at_peak
        by_category = ", ".join(f"{name} {format_bytes(size)}" for name, size in at_peak.items() if size)
        print(f"{ranks:,} ranks, stage {given.stage}: {plan.predicted_peak_bytes:,} bytes "
              f"({by_category}); {time.perf_counter() - start:.1f} s, of which the processor "
              f"{time.process_time() - processor:.1f} s", flush=True)
        print(plan)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Plan a Llama of 70 billion parameters for many ranks.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--lowering", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--resident", action="store_true")
    parser.add_argument("--master", action="store_true")
    given = parser.parse_args(arguments)
    (resident if given.resident else peaks)(given)


if __name__ == "__main__":
    main()
