"""memopt on a model alone, in somebody else's loop: the loop stays as it is and is not compiled.

There is no backward in what is compiled, so only the activations can be made smaller.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import arguments, compiled, train
from data import random_batch, shakespeare
from models import GPT, GPTConfig


def main() -> None:
    options = arguments("memopt on a model alone.", steps=100).parse_args()
    batch, sequence, width = (8, 32, 64) if options.quick else (16, 128, 128)
    options.steps = min(options.steps, 20) if options.quick else options.steps
    ids, _, alphabet = shakespeare()
    torch.manual_seed(options.seed)
    model = GPT(GPTConfig(len(alphabet), layers=2, width=width, context=sequence))
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    forward = compiled(model, options)  # The only line that is new.

    def step(tokens, targets):
        opt.zero_grad()
        loss = F.cross_entropy(forward(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        opt.step()
        return loss

    generator = torch.Generator().manual_seed(options.seed)
    train(step, lambda i: random_batch(ids, batch, sequence, generator), options.steps)


if __name__ == "__main__":
    main()
