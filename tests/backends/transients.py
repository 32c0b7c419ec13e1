"""What a step needs beyond parameters and optimizer state where hardly any activations are in the way.

    python tests/backends/transients.py [--lowering eager|inductor]

Each model trains on the smallest batch that it takes. So nearly all that its measured peak has beyond what
is resident are gradients, what their updates compute, and what backward needs on the way: the few
activations count against the goal, the gradients of the largest layer.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from tabulate import tabulate
from torch import Tensor, nn

import memopt_compile as memopt
from memopt_compile.measure import tensor_bytes

_spec = importlib.util.spec_from_file_location(
    "example_models", Path(__file__).parents[2] / "examples" / "models.py")
models = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)


def gpt(layers: int) -> tuple[nn.Module, type[nn.Module], Callable[[nn.Module], Tensor]]:
    x = torch.zeros(1, 1, dtype=torch.long)
    model = models.GPT(models.GPTConfig(65, layers))
    return model, models.Block, lambda model: F.cross_entropy(model(x).flatten(0, 1), x.flatten())


def resnet() -> tuple[nn.Module, type[nn.Module], Callable[[nn.Module], Tensor]]:
    x, y = torch.randn(1, 1, 8, 8), torch.zeros(1, dtype=torch.long)
    return models.ResNet(), models.Residual, lambda model: F.cross_entropy(model(x), y)


def bert() -> tuple[nn.Module, type[nn.Module], Callable[[nn.Module], Tensor]]:
    x = torch.zeros(1, 1, dtype=torch.long)
    model = transformers.BertForMaskedLM(transformers.BertConfig(
        vocab_size=66, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4))
    layer = transformers.models.bert.modeling_bert.BertLayer
    return model, layer, lambda model: model(input_ids=x, labels=x).loss


CASES = {"GPT, 4 layers": lambda: gpt(4), "GPT, 12 layers": lambda: gpt(12), "ResNet": resnet, "BERT, 4 layers": bert}


def transients(case: str, compiler: Callable[[Callable], Callable]) -> tuple[int, int, int]:
    """Bytes: of the largest layer's gradients, of all gradients, and of the measured peak beyond what stays."""
    torch.manual_seed(0)
    model, kind, loss_of = CASES[case]()
    opt = torch.optim.AdamW(model.parameters())

    def step() -> None:
        loss_of(model).backward()
        opt.step()
        opt.zero_grad()

    step = compiler(step)
    for _ in range(3):
        step()
    found = memopt.measure(step, resident=(model, opt))
    sizes = [tensor_bytes(list(m.parameters())) for m in model.modules() if isinstance(m, kind)]
    return max(sizes), tensor_bytes(list(model.parameters())), found.transient_peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lowering", choices=("eager", "inductor"), default="inductor")
    given = parser.parse_args()
    rows = []
    for case in CASES:
        layer, every, eager = transients(case, lambda step: step)
        *_, ours = transients(case, lambda step: memopt.compile(step, lowering=given.lowering))
        rows.append((case, *(f"{size:,}" for size in (every, eager, layer, ours)), f"{ours / layer:.2f}"))
        print(f"{case}: {ours / layer:.2f}", flush=True)
    print(tabulate(rows, ("model", "all gradients", "eager's transients", "largest layer's gradients",
                          "memopt's transients", "of the layer's"), disable_numparse=True, tablefmt="github"))


if __name__ == "__main__":
    main()
