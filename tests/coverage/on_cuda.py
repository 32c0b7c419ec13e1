"""Steps on a CUDA device: peak by what PyTorch's allocator counts, and time, of each way to run them, as a table.

    python tests/coverage/on_cuda.py [--only NAME ...] [--ways NAME ...] [--small]

Each way is in a process of its own. Those of `--at-once` models compile at the same time, and those whose budget is another's
measured peak begin after that one; then each is timed alone, in turns. In bfloat16 by autocast, with PyTorch's AdamW as it is by default. Peaks are of the step,
with parameters, gradients, optimizer state and batch; the allocator's own count has workspace that libraries keep, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import memopt_compile as memopt
from memopt_compile import bench

_spec = importlib.util.spec_from_file_location("example_models", Path(__file__).parents[2] / "examples" / "models.py")
models = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)

HEAD = ("model", "way", "peak MiB", "of the lower", "predicted MiB", "error", "allocator's MiB", "ms a step", "of torch.compile")


@dataclass(frozen=True)
class Way:
    """How a step is run, `options` being the compiler's; `budget_of` names the way whose measured peak, times `share`, is the budget."""

    compiler: str = "memopt"
    options: dict[str, Any] = field(default_factory=dict)
    checkpoints: bool = False
    budget_of: str = ""
    share: float = 1.0


THREE = {"eager": Way("eager"), "torch.compile": Way("inductor"), "memopt": Way()}
RECORDED = {"torch.compile, reduce-overhead": Way("inductor", {"mode": "reduce-overhead"})}  # by CUDA graphs, too
CHECKPOINTS, UNRECORDED = "torch.compile, a checkpoint for each layer", "memopt, cuda_graphs=False"
WITHIN = {f"memopt in {share:.0%} of its peak{', int4' * (compress is not None)}":
          Way(options={"compress": compress}, budget_of=CHECKPOINTS, share=share)
          for share, compress in ((1.05, None), (1.0, None), (0.8, None), (0.8, "int4"))}


def gpt(small: bool, device: str, micro_batches: int = 1, rows: int = 4) -> tuple[nn.Module, Callable, tuple]:
    config = models.GPTConfig(65, 2, 64, 4, 32) if small else models.GPTConfig(50304, 12, 768, 12, 1024)
    model = models.GPT(config).to(device)
    tokens = torch.randint(config.vocabulary, (rows * micro_batches, config.context), device=device)
    return model, lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten()), (tokens, tokens.roll(-1, 1))


def bert(small: bool, device: str) -> tuple[nn.Module, Callable, tuple]:
    """Of Hugging Face's own sizes (BERT-base), with dropout; a seventh of the tokens are to be told."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = BertForMaskedLM(BertConfig(**sizes if small else {})).to(device).train()
    tokens = torch.randint(30522, (4, 32) if small else (32, 128), device=device)
    labels = torch.where(torch.rand_like(tokens, dtype=torch.float) < 0.15, tokens, -100)
    return model, lambda x, y: model(input_ids=x, labels=y).loss, (tokens, labels)


def resnet(small: bool, device: str) -> tuple[nn.Module, Callable, tuple]:
    """Of Hugging Face's own sizes (ResNet-50), batch normalization in training mode."""
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 8, "hidden_sizes": [16, 16], "depths": [1, 1]}
    model = ResNetForImageClassification(ResNetConfig(num_labels=10, **sizes if small else {})).to(device).train()
    images = torch.randn((4, 3, 32, 32) if small else (64, 3, 224, 224), device=device)
    labels = torch.arange(len(images), device=device) % 10
    return model, lambda x, y: F.cross_entropy(model(x).logits, y), (images, labels)


def short(small: bool, device: str) -> tuple[nn.Module, Callable, tuple]:
    """A step that the device is done with before the host has launched the next kernel."""
    model = models.GPT(models.GPTConfig(65, 4, 64, 4, 32)).to(device)
    tokens = torch.randint(65, (2, 32), device=device)
    return model, lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten()), (tokens, tokens.roll(-1, 1))


CASES: dict[str, tuple[Callable, int, dict[str, Way]]] = {  # what makes a model, micro-batches, ways
    "GPT": (gpt, 1, {CHECKPOINTS: Way("inductor", checkpoints=True)} | THREE | RECORDED | {
        UNRECORDED: Way(options={"cuda_graphs": False}),
        "memopt, one big graph": Way(options={"pieces": False, "cuda_graphs": False})} | WITHIN),
    "GPT, 4 micro-batches": (lambda *given: gpt(*given, 4, 2), 4, THREE | {
        "memopt, AdamA": Way(options={"accumulate": "optimizer_states"})}),
    "BERT": (bert, 1, THREE | RECORDED), "ResNet": (resnet, 1, THREE),
    # Here the device has enough to do, and the layers' activations are most of the bytes.
    "GPT, 16 sequences": (lambda *given: gpt(*given, rows=16), 1, {
        CHECKPOINTS: Way("inductor", checkpoints=True), "torch.compile": Way("inductor"), "memopt": Way()} | WITHIN),
    "short GPT": (short, 1, THREE | {UNRECORDED: Way(options={"cuda_graphs": False})}),
}


def make(name: str, way: Way, small: bool, device: str) -> tuple[Callable[..., Tensor], tuple, Any]:
    """The step, its batch and what it trains."""
    torch.manual_seed(0)
    build, count, _ = CASES[name]
    model, loss_of, batch = build(small, device)
    if way.checkpoints:
        from batches import checkpoint_layers  # which loads modules with the names of others

        checkpoint_layers(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(*batch: Tensor) -> Tensor:
        total = torch.zeros((), device=device)
        for part in memopt.micro_batches(count, *batch) if count > 1 else [batch]:
            with torch.autocast(device, torch.bfloat16):
                loss = loss_of(*part) / count
            loss.backward()
            total = total + loss.detach()
        opt.step()
        opt.zero_grad()
        return total

    return step, batch, (model, opt)


def work(given: argparse.Namespace) -> None:
    """One way in this process, as `bench.answer` does it."""
    way = CASES[given.case][2][given.way]
    step, batch, trained = make(given.case, way, given.small, given.device)
    options = way.options | ({"memory_budget": given.budget} if given.budget else {})
    run = {"eager": lambda: step, "inductor": lambda: torch.compile(step, **way.options),
           "memopt": lambda: torch.compile(step, backend="memopt", options=options)}[way.compiler]()
    bench.answer(run, batch, way.compiler, trained)


def measured(case: str, start: Callable, wanted: Sequence[str], known: int) -> dict[str, tuple[Any, dict]]:
    """The processes of one model, ready to be timed, and what they found: those with budgets after the others, unless it is
    `known` in bytes what these are shares of."""
    ways, found = {name: way for name, way in CASES[case][2].items() if name in wanted or not wanted}, {}
    workers = {name: start(case, name, int(way.share * known) if way.budget_of else 0) for name, way in ways.items()
               if known or not way.budget_of}
    asked = list(workers)
    for name in asked:
        worker, late = workers[name]
        try:
            answer = worker.answer()
        except memopt.MemoptError as error:
            answer = {"refused": error}
        late.cancel()
        if "refused" in answer:
            print(f"{case}: {name}: {answer['refused']}", file=sys.stderr, flush=True)
            continue
        print(f"{case}: {name}: first call {answer['first']:.0f} s", file=sys.stderr, flush=True)
        found[name] = worker, answer
        for other in (n for n, way in ways.items() if way.budget_of == name and n not in workers):
            workers[other] = start(case, other, int(ways[other].share * answer["peak"]))
            asked.append(other)
    return found


def table_of(case: str, found: dict[str, tuple[Any, dict]], rounds: int) -> list[tuple[str, ...]]:
    """Rows of one model, its ways timed in turns."""
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, (worker, _) in list(found.items()):
            try:
                times[name] += worker.ask()
            except (memopt.MemoptError, OSError) as error:
                print(f"{case}: {name}: {error}", file=sys.stderr, flush=True)
                del found[name]
    others = [name for name in ("eager", "torch.compile") if name in found]
    lower = min((found[name][1]["peak"] for name in others), default=float("nan"))
    beside = statistics.median(times["torch.compile"]) if "torch.compile" in found else float("nan")
    rows = []
    for name, (_, each) in found.items():
        told = (f"{each['predicted'] / 2**20:.2f}", f"{each['predicted'] / each['peak'] - 1:+.2%}") if (
            "predicted" in each) else ("", "")
        seconds = statistics.median(times[name])
        rows.append((case, name, f"{each['peak'] / 2**20:.2f}", f"{each['peak'] / lower:.3f}", *told,
                     f"{each['allocated'] / 2**20:.2f}" if "allocated" in each else "",
                     f"{1e3 * seconds:.2f}", f"{seconds / beside:.3f}"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=5, help="of ten calls each on a GPU")
    parser.add_argument("--small", action="store_true", help="small models")
    parser.add_argument("--patience", type=float, default=1200, help="seconds; what has not compiled by then is left out")
    parser.add_argument("--at-once", type=int, default=2, help="models whose ways compile at the same time")
    parser.add_argument("--ways", nargs="*", default=[], help="those to run, by their names in the table")
    parser.add_argument("--known", type=float, default=0, help="MiB that budgets are shares of, where they need not be waited for")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # one way of it, in this process
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        return work(given)
    rows, end = [], time.monotonic() + given.patience
    with ExitStack() as stack, ThreadPoolExecutor(given.at_once) as threads:
        cache = stack.enter_context(tempfile.TemporaryDirectory())

        def start(case: str, way: str, budget: int) -> Any:
            command = [sys.executable, __file__, "--case", case, "--way", way, "--budget", str(budget),
                       "--device", given.device, *["--small"] * given.small]
            worker = stack.enter_context(bench._Worker(command, cache))
            late = threading.Timer(max(0.0, end - time.monotonic()), worker.process.kill)
            late.start()
            return worker, late

        cases = dict(zip(given.only, threads.map(
            lambda case: measured(case, start, given.ways, int(given.known * 2**20)), given.only)))
        for case, found in cases.items():
            rows += table_of(case, found, given.rounds)
            print(*rows[-len(found):], sep="\n", file=sys.stderr, flush=True)
    print(tabulate(rows, HEAD, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")  # many processes compile at once
    main()
