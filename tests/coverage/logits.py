"""The loss layer by parts: peaks of language models with and without, predicted beside measured.

    python tests/coverage/logits.py [--only NAME ...] [--lowering eager] [--double] [--smallest]

Each model takes one step of AdamW on 4 x 256 tokens: without a budget, then under budgets that are a
share of the captured step's peak, with `recompute=False`, so that only `chunk_logits` can keep them. Three more
losses are of a Llama and a frozen second one: a preference of two sequences to two others (DPO, Rafailov et al.,
2023, eq. 7), a policy's clipped ratio (Schulman et al., 2017, eq. 7) whose log-probabilities come of a loop over the samples,
and what it learns of a wider one (distillation, Hinton et al., 2015) beside the targets. The difference is the largest of any parameter after the step, relative to that parameter's largest value.
`--smallest` plans for no bytes at all, with recomputation: the peak that it is refused with is the
smallest one, printed with the loss layer whole and by parts.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torch.nn.functional as F
from budget import difference, in_processes
from tabulate import tabulate

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

import memopt_compile as memopt  # noqa: E402
from memopt_compile.passes.chunk_logits import ChunkLogits  # noqa: E402

SHARES = (0.8, 0.7, 0.6, 0.5, 0.4)
HEAD = ("model", "share", "budget", "predicted", "measured", "beyond the inputs", "parts", "difference")


def gpt2() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=50_257, n_positions=256, n_embd=256, n_layer=4, n_head=4, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0))


def llama(width: int = 256) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=32_000, hidden_size=width, intermediate_size=688, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, use_cache=False))


def of_next_tokens(model: torch.nn.Module, other: None, x: torch.Tensor) -> torch.Tensor:
    return model(input_ids=x, labels=x).loss


def preference(model: torch.nn.Module, other: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    def of_sequences(logits: torch.Tensor) -> torch.Tensor:
        of_tokens = logits[:, :-1].log_softmax(-1).gather(-1, x[:, 1:, None]).squeeze(-1)
        chosen, rejected = of_tokens.sum(-1).chunk(2)
        return chosen - rejected

    with torch.no_grad():
        before = of_sequences(other(input_ids=x).logits)
    return -F.logsigmoid(0.1 * (of_sequences(model(input_ids=x).logits) - before)).mean()


def distillation(model: torch.nn.Module, other: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        wanted = (other(input_ids=x).logits / 2).softmax(-1)
    made = model(input_ids=x, labels=x)
    return made.loss + 4 * F.kl_div((made.logits / 2).log_softmax(-1), wanted, reduction="batchmean") / x.shape[1]


def policy(model: torch.nn.Module, other: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    def of_tokens(logits: torch.Tensor) -> torch.Tensor:
        logits = logits[:, :-1]
        chosen = logits.gather(-1, x[:, 1:, None]).squeeze(-1)
        return chosen - torch.stack([of_sample.logsumexp(-1) for of_sample in logits])

    with torch.no_grad():
        before = of_tokens(other(input_ids=x).logits)
    ratio = (of_tokens(model(input_ids=x).logits) - before).exp()
    worth = torch.linspace(-1, 1, len(x))[:, None]
    return -torch.minimum(ratio * worth, ratio.clamp(0.8, 1.2) * worth).mean()


# By name: the model, a frozen one beside it, the loss, and how many wide matrices are gathered from.
MODELS = {
    "GPT-2, 50,257 tokens, tied": (gpt2, lambda: None, of_next_tokens, 1),
    "Llama, 32,000 tokens": (llama, lambda: None, of_next_tokens, 1),
    "Llama, preference": (llama, llama, preference, 2),
    "Llama, policy": (llama, llama, policy, 2),
    "Llama, distillation": (llama, partial(llama, 512), distillation, 1),
}


def train(name: str, **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The report of one step, and the parameters after it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    make, make_other, loss_of, _ = MODELS[name]
    model, other = make(), make_other()
    if other is not None:
        other.requires_grad_(False)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, other, x)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    compiled = memopt.compile(step, **{"recompute": False, **options})
    compiled(torch.randint(32_000, (4, 256)))
    return memopt.report(compiled), {k: v.detach() for k, v in model.named_parameters()}


def smallest(name: str, lowering: str) -> None:
    """Print the smallest peak that is found, with the loss layer whole and by parts."""
    for what, tried in (("whole", lambda self, step: "it stays whole"), ("by parts", ChunkLogits.requires)):
        with mock.patch.object(ChunkLogits, "requires", tried):
            try:
                train(name, lowering=lowering, memory_budget=1, recompute=True)
            except memopt.InfeasibleBudget as refusal:
                print(f"{name}, loss layer {what}: {refusal.what}", flush=True)


def parts(report: Any, gathered: int) -> str:
    """In how many parts the loss layer runs, from what the pass has changed."""
    (changes,) = [dict(p.op_changes) for p in report.passes if p.name == "chunk_logits"]
    return str(changes.get("nll_loss_forward", changes.get("gather", 0)) // gathered + 1)


def rows(name: str, lowering: str) -> list[list[str]]:
    """One row for each budget, from the largest, until one is refused."""
    free, expected = train(name, lowering=lowering)
    found = [[name, "none", "", *peaks(free), "1", ""]]
    for share in SHARES:
        try:
            report, got = train(name, lowering=lowering, memory_budget=share)
        except memopt.InfeasibleBudget as refusal:
            found.append([name, f"{share:.1f}", "refused: " + refusal.what.split(";")[0], *[""] * 5])
            break
        found.append([name, f"{share:.1f}", mib(report.budget_bytes), *peaks(report), parts(report, MODELS[name][-1]),
                      f"{difference(expected, got):.0e}"])
    return found


def peaks(report: Any) -> tuple[str, str, str]:
    return (mib(report.predicted_peak_bytes), mib(report.measured_peak_bytes),
            mib(report.measured_peak_bytes - report.resident_bytes))


def mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--lowering", default="eager", choices=("eager", "inductor"))
    parser.add_argument("--double", action="store_true", help="in float64")
    parser.add_argument("--smallest", action="store_true")
    parser.add_argument("--one", choices=list(MODELS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64 if options.double else torch.float32)
    if options.one:
        for row in rows(options.one, options.lowering):
            print("\t".join(row), flush=True)
        return
    if options.smallest:
        for name in options.only:
            smallest(name, options.lowering)
        return
    table = []
    for found in in_processes(__file__, options.only, options.lowering, ["--double"] * options.double):
        table += found
    print(tabulate(table, HEAD, tablefmt="github", disable_numparse=True), flush=True)


if __name__ == "__main__":
    main()
