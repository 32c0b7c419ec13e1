"""Train a ResNet-style net with BatchNorm on Fashion-MNIST; the last batch of an epoch is short."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import arguments, compiled, train
from data import fashion_mnist
from models import ResNet


def main() -> None:
    options = arguments(__doc__, steps=300).parse_args()
    images, labels, test_images, test_labels = fashion_mnist()
    size = 128
    if options.quick:
        images, labels, size = images[:200], labels[:200], 64  # 64, 64, 64 and a short batch of 8
        test_images, test_labels = test_images[:500], test_labels[:500]
        options.steps = min(options.steps, 12)
    torch.manual_seed(options.seed)
    model = ResNet((8, 16) if options.quick else (16, 32, 64))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    def step(x, y):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    batches = [torch.arange(i, min(i + size, len(images))) for i in range(0, len(images), size)]
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(options.seed))

    def batch(i: int):
        chosen = order[batches[i % len(batches)]]
        return images[chosen], labels[chosen]

    train(compiled(step, options), batch, options.steps)
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum())
                    for x, y in zip(test_images.split(500), test_labels.split(500)))
    print(f"test accuracy {right / len(test_images):.3f}")


if __name__ == "__main__":
    main()
