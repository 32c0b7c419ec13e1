"""memopt on a model alone, in a training loop that stays as it is: activations only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import arguments, compiled, train
from data import fashion_mnist
from models import ResNet


def main() -> None:
    options = arguments(__doc__, steps=100).parse_args()
    images, labels, *_ = fashion_mnist()
    options.steps = min(options.steps, 8) if options.quick else options.steps
    torch.manual_seed(options.seed)
    plain = ResNet((8, 16))
    model = compiled(plain, options)  # the only line that is new
    opt = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)

    def step(x, y):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    train(step, lambda i: (images[i * 64:(i + 1) * 64], labels[i * 64:(i + 1) * 64]), options.steps)


if __name__ == "__main__":
    main()
