"""Bytes of optimizer state on BERT's shape, and on convolutions, against Adam's. Nothing is computed.

    python tests/optim/came_state.py [--layers 48] [--width 2560]

The state of each parameter is made without memory (on torch's device "meta"): its bytes are those of
`Optimizer.first_state` in the formats of `state_bits`. The convolutions are those of ResNet-50.
"""

from __future__ import annotations

import argparse
import itertools

import torch
import transformers
from torch import nn

import memopt_compile as memopt

optim = memopt.optim


def state_bytes(parameters, make) -> int:
    parameters = list(parameters)
    opt, total = make(parameters), 0
    group = opt.param_groups[0]
    bits = group["state_bits"]
    for p in parameters:
        formats = opt.formats(p, group)
        for name, value in opt.first_state(p, group).items():
            form = formats.get(name)
            if form is None:
                total += value.nbytes
            else:
                codes, scales = form.sizes(p.numel())
                total += codes * (2 if bits == 16 else 1) + 4 * scales  # bfloat16, or bytes
    return total


def resnet50_kernels() -> list[nn.Parameter]:
    """Shapes from its paper: each block 1×1, 3×3, 1×1, the first of a stage with one to widen."""
    shapes, width = [(64, 3, 7, 7)], 64
    for inner, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(inner, width, 1, 1), (inner, inner, 3, 3), (4 * inner, inner, 1, 1)]
            shapes += [(4 * inner, width, 1, 1)] * (block == 0)
            width = 4 * inner
    return [nn.Parameter(torch.empty(s, device="meta")) for s in shapes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=2560)
    given = parser.parse_args()
    with torch.device("meta"):
        bert = transformers.BertForMaskedLM(transformers.BertConfig(
            hidden_size=given.width, intermediate_size=4 * given.width,
            num_hidden_layers=given.layers, num_attention_heads=given.width // 64))
    kernels = resnet50_kernels()
    for name, parameters, choices in (
            ("BERT", list(bert.parameters()), [None]),
            ("ResNet-50's kernels", kernels, [None, "auto"]),
            ("  of these 1 by 1", [k for k in kernels if k.shape[-1] == 1], [None, "auto"])):
        adam = state_bytes(parameters, optim.Adam)
        print(f"{name}: {sum(p.numel() for p in parameters):,} parameters, Adam {adam:,} bytes")
        for choice, bits in itertools.product(choices, (32, 16, 8)):
            size = state_bytes(parameters, lambda p, choice=choice, bits=bits: optim.CAME(
                p, lr=1e-3, factor_dims=choice, state_bits=bits))
            print(f"  CAME, m of {bits} bits, factor_dims={choice}: {size:,} bytes, {size / adam:.4f}")


if __name__ == "__main__":
    main()
