"""Plans on fake tensors: model memory at the peak of RoBERTa-Large's shape with Adam, ResNet-50's with SGDM.

    python tests/lpmm/planned.py [--only roberta resnet50] [--ways NAME ...] [--batch 16] [--layers 24]

No tensor has memory and nothing of a step runs (but each distinct operator once, for its workspace). The
models are RoBERTa-Large with a classifier, 128 tokens, and ResNet-50, 224 by 224, from the configurations
in transformers.

A row has the model memory (parameters, gradients, optimizer state, buffers) between steps, at the peak of the
schedule and at most, and the rest at that peak. "ordinary" is full precision with all gradients there
before the update, as without a compiler; "LPMM's formats" have 8-bit gradients there, as its Algorithm 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    ResNetConfig,
    ResNetForImageClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

import memopt_compile as memopt

LENGTH, MIB = 128, 2**20
BITS = {"roberta": 8, "resnet50": 12}
WAYS = {  # in low precision; gradients are all there before the update, in so many bits
    "ordinary": (False, 32), "full precision, memopt": (False, None),
    "LPMM's formats": (True, 8), "LPMM, memopt": (True, None)}


def roberta(layers: int) -> nn.Module:
    return RobertaForSequenceClassification(RobertaConfig(
        vocab_size=50265, hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16,
        intermediate_size=4096, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5))


def made(name: str, batch: int, layers: int) -> tuple[nn.Module, tuple, Callable]:
    """Model, batch, and its loss."""
    if name == "roberta":
        model = roberta(layers)
        args = torch.randint(5, 50000, (batch, LENGTH)), torch.randint(2, (batch,))
        return model, args, lambda x, y: model(input_ids=x, labels=y).loss
    model = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    args = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
    return model, args, lambda x, y: model(pixel_values=x, labels=y).loss


def plan(name: str, way: str, batch: int, layers: int) -> Any:
    """The report of a step of model `name`, planned."""
    low, together = WAYS[way]
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, args, loss_of = made(name, batch, layers)
        model.train()
        if low:
            memopt.quantize_parameters_(model, BITS[name])
        kept = {"state_bits": 8, "gradient_bits": together or 32} if low else {}
        opt = (memopt.optim.Adam(model.parameters(), **kept) if name == "roberta" else
               memopt.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **kept))

    def step(x, y):
        loss = loss_of(x, y)
        loss.backward()
        if together == 8:
            opt.accumulate()
        elif together:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return memopt.explain(step, *args, lowering="eager")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=BITS, default=list(BITS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="NAME")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--layers", type=int, default=24, help="of RoBERTa")
    given = parser.parse_args()
    print("| model, way | bits between steps | model memory at the peak, MiB | at most | the rest at the peak |\n"
          "|---|---|---|---|---|")
    for name in given.only:
        for way in given.ways:
            memory = plan(name, way, given.batch, given.layers).memory
            between, at_peak, most = map(memory.model_bytes, (memory.between, memory.at_peak, memory.most))
            rest = sum(memory.at_peak.values()) - at_peak
            print(f"| {name}, {way} | {memory.bits(between):.2f} | {at_peak / MIB:.0f} | {most / MIB:.0f} | "
                  f"{rest / MIB:.0f} |", flush=True)


if __name__ == "__main__":
    main()
