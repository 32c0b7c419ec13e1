"""Plans on fake tensors: model memory at the peak, and the deepest model that can be trained in 11 GB.

    python tests/lpmm/planned.py peak [--only roberta resnet50] [--batch 16]
    python tests/lpmm/planned.py depth [--memory 11GB]

No tensor has memory and nothing of a step runs (but each distinct operator once, for its workspace).
The models are RoBERTa-Large's shape with a classifier, 128 tokens, and ResNet-50's, 224 by 224, from
the configurations in transformers.

`peak` has the model memory (parameters, gradients, optimizer state, buffers) between steps, at the peak of
the schedule and at most, and the rest at that peak. "Ordinary" is full precision where all gradients are
there before the update, as a norm of all of them wants it, and as it is without a compiler.

`depth` is for RoBERTa's shape at batch 1: in full precision, with LPMM's formats (8-bit gradients too, as
its Algorithm 1 keeps them), and with memopt, which frees gradients and honours checkpoints of layers. Layers add equal bytes: the peak is a line through the plans of 4
and 8 layers, and the answer the most layers for which that line is within the memory.
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
from memopt_compile.options import parse_bytes

LENGTH, MIB = 128, 2**20
BITS = {"roberta": 8, "resnet50": 12}
WAYS = {  # in low precision; gradients are all there before the update, in 32 or 8 bits; checkpoints
    "ordinary": (False, 32, False), "full precision, memopt": (False, None, False),
    "LPMM's formats": (True, 8, False), "LPMM, memopt": (True, None, False),
    "LPMM, memopt, checkpoints": (True, None, True)}


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


def plan(name: str, way: str, batch: int, layers: int = 24) -> Any:
    """The report of a step of model `name`, planned."""
    low, together, checkpoints = WAYS[way]
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, args, loss_of = made(name, batch, layers)
        model.train()
        if low:
            memopt.quantize_parameters_(model, BITS[name])
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
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


def peaks(names: list[str], batch: int) -> None:
    print("| model, way | bits between steps | model memory at the peak, MiB | at most | the rest at the peak |\n"
          "|---|---|---|---|---|")
    for name in names:
        for way in ("ordinary", "full precision, memopt", "LPMM's formats", "LPMM, memopt"):
            report = plan(name, way, batch)
            memory = report.memory
            at_peak, most = (memory.model_bytes(of) for of in (memory.at_peak, memory.most))
            print(f"| {name}, {way} | {memory.bits(memory.model_bytes(memory.between)):.2f} | {at_peak / MIB:.0f} | "
                  f"{most / MIB:.0f} | {(sum(memory.at_peak.values()) - at_peak) / MIB:.0f} |", flush=True)


def depth(limit: int) -> None:
    print("| way | layers | parameters |\n|---|---|---|")
    for way in ("ordinary", "LPMM's formats", "LPMM, memopt", "LPMM, memopt, checkpoints"):
        few, more = (plan("roberta", way, 1, layers) for layers in (4, 8))
        each = (more.predicted_peak_bytes - few.predicted_peak_bytes) / 4
        layers = int(4 + (limit - few.predicted_peak_bytes) / each)
        count = few.memory.parameters + (layers - 4) * (more.memory.parameters - few.memory.parameters) // 4
        print(f"| {way} | {layers} | {count / 1e6:.0f} million |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("peak", "depth"))
    parser.add_argument("--only", nargs="+", choices=BITS, default=list(BITS))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--memory", default="11GB")
    given = parser.parse_args()
    if given.what == "peak":
        peaks(given.only, given.batch)
    else:
        depth(parse_bytes(given.memory))


if __name__ == "__main__":
    main()
