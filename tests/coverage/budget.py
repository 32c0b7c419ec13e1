"""Budgets kept: models trained under ten budgets each, measured beside predicted, as a table.

    python tests/coverage/budget.py [--only NAME ...] [--lowering eager] [--shares 0.95 ...] [--dry]
                                                  (dry: planned and lowered, nothing run or measured)
    python tests/coverage/budget.py --least [--compress int4]
                                                  the smallest peak of a Llama-like stack
    python tests/coverage/budget.py --checkpoint [--compress int4]
                                                  against a checkpoint around every layer
    python tests/coverage/budget.py --gradients [--only NAME ...] [--lowering eager] [--shares 0.95 0.5]
                                    [--precisions float64 float32]
                                                  of one step, with and without a budget

A budget is the step's resident bytes and a share of what it holds beyond them with no budget.
Every run starts from the same parameters, batch and random numbers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torch.nn.functional as F
from tabulate import tabulate

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import memopt_compile as memopt  # noqa: E402
from memopt_compile.reporting import explaining  # noqa: E402
from memopt_compile.seconds import roofline  # noqa: E402

SHARES = (0.95, 0.86, 0.77, 0.68, 0.59, 0.5, 0.41, 0.32, 0.23, 0.14)
STEPS = 3
HEAD = ("model", "share", "budget", "predicted", "measured", "kept", "added seconds", "gap", "difference")


def tokens(vocabulary: int, batch: int, length: int) -> tuple:
    return (torch.randint(vocabulary, (batch, length)),) * 2


def gpt() -> tuple:
    from models import GPT, GPTConfig
    model = GPT(GPTConfig(82, 6, 128, 4, 128, dropout=0.1))
    return model, lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten()), tokens(82, 32, 128)


def llama(layers: int = 12, dropout: float = 0.1) -> tuple:
    from transformers import LlamaConfig, LlamaForCausalLM
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=344, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, attention_dropout=dropout, use_cache=False))
    return model, lambda x, y: model(input_ids=x, labels=y).loss, tokens(128, 8, 128)


def bert(dropout: float = 0.1) -> tuple:
    from transformers import BertConfig, BertForMaskedLM
    model = BertForMaskedLM(BertConfig(
        vocab_size=512, hidden_size=128, intermediate_size=512, num_hidden_layers=6,
        num_attention_heads=4, max_position_embeddings=128, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout))
    return model, lambda x, y: model(input_ids=x, labels=y).loss, tokens(512, 8, 128)


def resnet() -> tuple:
    from models import ResNet
    model = ResNet((16, 32, 64))
    return (model, lambda x, y: F.cross_entropy(model(x), y),
            (torch.randn(64, 1, 28, 28), torch.randint(10, (64,))))


def vit(dropout: float = 0.1) -> tuple:
    from transformers import ViTConfig, ViTForImageClassification
    model = ViTForImageClassification(ViTConfig(
        hidden_size=128, num_hidden_layers=6, num_attention_heads=4, intermediate_size=512,
        image_size=64, patch_size=8, hidden_dropout_prob=dropout, num_labels=10))
    return (model, lambda x, y: F.cross_entropy(model(x).logits, y),
            (torch.randn(16, 3, 64, 64), torch.randint(10, (16,))))


def mixtral() -> tuple:
    from transformers import MixtralConfig, MixtralForCausalLM
    model = MixtralForCausalLM(MixtralConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, use_cache=False))
    return model, lambda x, y: model(input_ids=x, labels=y).loss, tokens(128, 4, 128)


# What makes model, loss and batch; and the number of micro-batches.
MODELS: dict[str, tuple[Callable[[], tuple], int]] = {
    "GPT, dropout, 4 micro-batches": (gpt, 4), "Llama, 12 layers, dropout": (llama, 1),
    "BERT, dropout": (bert, 1), "ResNet, 2 micro-batches": (resnet, 2), "ViT, dropout": (vit, 1),
    "Mixtral (MoE)": (mixtral, 1),
}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def make_step(name: str, optimizer: Callable = adamw,
              dtype: torch.dtype = torch.float32) -> tuple[Callable, tuple, torch.nn.Module]:
    """The training step of a fresh model, its arguments, and the model."""
    make, n = MODELS[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, loss_of, batch = make()
    model.train().to(dtype)
    batch = tuple(t.to(dtype) if t.is_floating_point() else t for t in batch)
    opt = optimizer(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for inputs, targets in memopt.micro_batches(n, x, y):
            loss = loss_of(inputs, targets) / n
            loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step, batch, model


def train(name: str, budget: int | None, lowering: str,
          compress: str | None = None, dry: bool = False) -> tuple[Any, dict[str, torch.Tensor]]:
    """The report of `STEPS` steps, and the parameters after them; of none if `dry`."""
    step, batch, model = make_step(name)
    if dry:
        return memopt.explain(step, *batch, lowering=lowering, memory_budget=budget, compress=compress), {}
    compiled = memopt.compile(step, lowering=lowering, memory_budget=budget, compress=compress)
    for _ in range(STEPS):
        compiled(*batch)
    return memopt.report(compiled), {k: v.detach() for k, v in model.named_parameters()}


def rows(name: str, lowering: str, shares: Iterable[float], dry: bool = False) -> Iterator[list[str]]:
    """One row for each budget, from the largest, as it is measured, or predicted if `dry`."""
    def measured(report: Any) -> str:
        return "" if dry else mib(report.measured_peak_bytes)

    free, expected = train(name, None, lowering, dry=dry)
    resident = free.resident_bytes
    beyond = (free.predicted_peak_bytes if dry else free.measured_peak_bytes) - resident
    yield [name, "none", "", mib(free.predicted_peak_bytes), measured(free), *[""] * 4]
    before = None
    for share in sorted(shares, reverse=True):
        budget = resident + int(share * beyond)
        try:
            report, got = train(name, budget, lowering, dry=dry)
        except memopt.InfeasibleBudget as refusal:
            yield [name, f"{share:.2f}", mib(budget), "", "",
                   "refused: " + refusal.what.split(" and the budget")[0], "", "", ""]
            continue
        seconds, gap = (report.plan.seconds, report.plan.gap) if report.plan else (0.0, 0.0)
        peak = report.predicted_peak_bytes if dry else report.measured_peak_bytes
        kept = "yes" if peak <= budget else "NO"
        if before and (peak > before[0] or seconds < before[1]):
            kept += ", NOT monotone"
        before = peak, seconds
        yield [name, f"{share:.2f}", mib(budget), mib(report.predicted_peak_bytes), measured(report), kept,
               f"{1e3 * seconds:.2f} ms", f"{gap:.1%}", "" if dry else f"{difference(expected, got):.0e}"]


def least(lowering: str, compress: str | None) -> None:
    """The smallest peak by recomputation, and lossy formats if asked for, run and measured."""
    MODELS["plain"] = partial(llama, dropout=0.0), 1
    free, expected = train("plain", None, lowering)
    step, batch, _ = make_step("plain")
    planned = memopt.explain(step, *batch, lowering=lowering, compress=compress,
                             memory_budget=[1]).points[0]
    report, got = train("plain", planned.peak_bytes, lowering, compress)
    beyond = [r.measured_peak_bytes - r.resident_bytes for r in (free, report)]
    print(f"12 Llama layers, {lowering} lowering, compress={compress}: {mib(beyond[0])} MiB beyond the inputs without a "
          f"budget, {mib(beyond[1])} MiB with the smallest: {beyond[1] / beyond[0]:.3f}; "
          f"parameters differ by {difference(expected, got):.0e}")


def gpt2(dropout: float = 0.0) -> tuple:
    """GPT-2's smallest, as published."""
    from transformers import GPT2Config, GPT2LMHeadModel
    config = GPT2Config(attn_pdrop=dropout, embd_pdrop=dropout, resid_pdrop=dropout, use_cache=False)
    model = GPT2LMHeadModel(config)
    return model, lambda x, y: model(input_ids=x, labels=y).loss, tokens(config.vocab_size, 2, 512)


def bert_base(dropout: float = 0.0) -> tuple:
    """BERT's smaller, as published."""
    from transformers import BertConfig, BertForMaskedLM
    config = BertConfig(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    model = BertForMaskedLM(config)
    return model, lambda x, y: model(input_ids=x, labels=y).loss, tokens(config.vocab_size, 8, 128)


class Adapted(torch.nn.Module):
    """What is there, and a product of rank 8 beside it that alone is trained (LoRA)."""

    def __init__(self, there: torch.nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.there = there
        self.down, self.up = torch.nn.Linear(inputs, 8, bias=False), torch.nn.Linear(8, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.there(x) + self.up(self.down(x))


def gpt2_adapters(dropout: float = 0.0) -> tuple:
    """GPT-2 frozen, with an adapter at the queries, keys and values of each layer."""
    model, loss, batch = gpt2(dropout)
    model.requires_grad_(False)
    for layer in model.transformer.h:
        layer.attn.c_attn = Adapted(layer.attn.c_attn, *layer.attn.c_attn.weight.shape)
    return model, loss, batch


def bert_adapters(dropout: float = 0.0) -> tuple:
    """BERT-Base frozen, with adapters at the queries and values of each layer, to tell classes of texts."""
    from transformers import BertConfig, BertForSequenceClassification
    model = BertForSequenceClassification(BertConfig(
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=4))
    model.bert.requires_grad_(False)
    for layer in model.bert.encoder.layer:
        at = layer.attention.self
        at.query, at.value = Adapted(at.query, 768, 768), Adapted(at.value, 768, 768)
    texts = torch.randint(model.config.vocab_size, (8, 128))
    return model, lambda x, y: model(input_ids=x, labels=y).loss, (texts, torch.randint(4, (8,)))


CHECKPOINTED = {"Llama, 12 layers": llama, "BERT": bert, "ViT": vit, "GPT-2": gpt2,
                "BERT-Base": bert_base, "GPT-2, adapters": gpt2_adapters,
                "BERT-Base, adapters": bert_adapters}


def checkpoint(names: list[str], lowering: str, compress: str | None) -> None:
    """A checkpoint around every layer; and no checkpoint but a budget, planned: of the peak that the checkpoints
    have in eager, measured, and of what they have when memopt plans the step that has them. Beside the throughput is
    the most that any plan of the same operators can have, by the gap that the solver proved."""
    table, made = [], []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made.append(adamw(parameters))
        return made[-1]

    for name in names:
        MODELS["plain"] = partial(CHECKPOINTED[name], dropout=0.0), 1
        step, batch, model = make_step("plain", optimizer)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        step(*batch)
        eager = memopt.measure(step, *batch, resident=(model, made.pop())).peak_bytes
        marked = explaining.planned(step, batch, {"lowering": lowering})
        step, batch, _ = make_step("plain")
        for whose, peak in (("eager", eager), ("memopt", marked.predicted_peak_bytes)):
            ours = explaining.planned(step, batch, {"lowering": lowering, "memory_budget": peak, "compress": compress})
            theirs, spent = (1e3 * sum(map(roofline("cpu"), r.step.computing())) for r in (marked, ours))
            least = spent - 1e3 * ours.step.plan.gap * ours.step.plan.seconds if ours.step.plan else spent
            table.append([name, whose, mib(peak), mib(ours.predicted_peak_bytes), f"{theirs:.1f}", f"{spent:.1f}",
                          f"{theirs / spent:.3f}", f"{theirs / least:.3f}"])
            print(*table[-1], sep="\t", file=sys.stderr, flush=True)
    print(tabulate(table, ["model", "checkpoints in", "their peak, MiB", "memopt's", "checkpoints, ms",
                           "memopt, ms", "throughput", "of any plan"], tablefmt="github", disable_numparse=True))


def gradients(names: list[str], lowering: str, shares: Iterable[float], precisions: Sequence[str]) -> None:
    """Relative differences of gradients with a budget from those without, by their Euclidean norms, and of
    both from those of the first precision without one: of float64, how far rounding takes them."""
    def step_of(name: str, dtype: torch.dtype, budget: int | None) -> tuple[Any, dict[str, torch.Tensor]]:
        made = []

        def momentum(parameters: Any) -> torch.optim.Optimizer:
            made.append(torch.optim.SGD(parameters, lr=1e-3, momentum=0.9))
            return made[0]

        step, batch, model = make_step(name, momentum, dtype)
        compiled = memopt.compile(step, lowering=lowering, memory_budget=budget)
        compiled(*batch)
        # The first momentum is the gradient; a difference of parameters would be rounded to their digits.
        return memopt.report(compiled), {k: made[0].state[v]["momentum_buffer"] for k, v in model.named_parameters()}

    table = []
    for name in names:
        exact: dict[str, torch.Tensor] = {}
        for precision in precisions:
            dtype = getattr(torch, precision)
            free, expected = step_of(name, dtype, None)
            exact = exact or expected
            for share in shares:
                beyond = free.measured_peak_bytes - free.resident_bytes
                try:
                    _, got = step_of(name, dtype, free.resident_bytes + int(share * beyond))
                except memopt.InfeasibleBudget:
                    continue
                other = [k for k, g in expected.items() if not torch.equal(g, got[k])]
                table.append([name, precision, f"{share:.2f}", f"{apart(got, expected):.1e}",
                              f"{len(other)} of {len(got)}", ", ".join(other[:2]),
                              f"{apart(expected, exact):.1e}", f"{apart(got, exact):.1e}"])
                print(*table[-1], sep="\t", file=sys.stderr, flush=True)
    print(tabulate(table, ["model", "precision", "share", "largest difference", "not equal", "such as",
                           f"unbudgeted from {precisions[0]}", f"budgeted from {precisions[0]}"],
                   tablefmt="github", disable_numparse=True))


def apart(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest distance of any tensor, relative to its norm; without those that are zero but for rounding."""
    norms = {k: float(g.norm()) for k, g in expected.items()}
    return max(float((got[k] - g).norm()) / norms[k] for k, g in expected.items()
               if norms[k] > 1e-12 * max(norms.values()))


def mib(size: int) -> str:
    return f"{size / 2**20:.3f}"


def difference(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> float:
    """The largest of any parameter, relative to its largest value."""
    return max(float((p - got[k]).abs().max() / p.abs().max()) for k, p in expected.items())


def in_processes(script: str, names: list[str], lowering: str,
                 more: Iterable[str] = ()) -> Iterator[list[list[str]]]:
    """The rows that `script --one NAME` prints for each name, in a process of its own; on stderr at once."""
    for name in names:
        command = [sys.executable, script, "--one", name, "--lowering", lowering, *more]
        found = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in filter(lambda line: "\t" in line, process.stdout or ()):
                print(line, end="", file=sys.stderr, flush=True)
                found.append(line.rstrip("\n").split("\t"))
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=[*MODELS, *CHECKPOINTED])
    parser.add_argument("--lowering", default="eager", choices=("eager", "inductor"))
    parser.add_argument("--shares", nargs="*", type=float)
    parser.add_argument("--precisions", nargs="*", default=("float64", "float32"), choices=("float64", "float32"))
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--least", action="store_true")
    parser.add_argument("--compress", choices=("int8", "int4", "auto"))
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--gradients", action="store_true")
    parser.add_argument("--one", choices=list(MODELS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.only = options.only or list(CHECKPOINTED if options.checkpoint else MODELS)
    torch.set_num_threads(1)
    if options.least:
        least(options.lowering, options.compress)
        return
    if options.checkpoint:
        checkpoint(options.only, options.lowering, options.compress)
        return
    if options.gradients:
        gradients(options.only, options.lowering, options.shares or (0.95, 0.5), options.precisions)
        return
    if options.one:
        for row in rows(options.one, options.lowering, options.shares or SHARES, options.dry):
            print("\t".join(row), flush=True)
        return
    table = []
    for found in in_processes(__file__, options.only, options.lowering,
                              ["--shares", *map(str, options.shares or SHARES), *["--dry"] * options.dry]):
        table += found
        print(tabulate(found, HEAD, tablefmt="github", disable_numparse=True), flush=True)
    kept = [row[5] for row in table if row[2]]
    print(f"\n{sum(k.startswith('yes') for k in kept)} budgets kept, "
          f"{sum(k.startswith('refused') for k in kept)} refused, "
          f"{sum(k.startswith('NO') for k in kept)} not kept, "
          f"{sum('monotone' in k for k in kept)} not monotone; largest difference "
          f"{max((float(row[8]) for row in table if row[8]), default=0):.0e}")


if __name__ == "__main__":
    main()
