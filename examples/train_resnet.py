"""Train a small ResNet on Fashion-MNIST with SGD: BatchNorm, and a short batch ends each epoch."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from common import arguments, compiled, train
from data import fashion_mnist
from models import ResNet

from memopt_compile.bench import answer, compare


def main() -> None:
    options = arguments("Train a small ResNet on Fashion-MNIST.", steps=300).parse_args()
    images, labels, test_images, test_labels = fashion_mnist()
    count, size, widths = 20_000, 128, (16, 32, 64)
    if options.quick:
        count, size, widths = 200, 64, (8, 16)
        test_images, test_labels = test_images[:500], test_labels[:500]
        options.steps = min(options.steps, 12)
    torch.manual_seed(options.seed)
    model = ResNet(widths)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    batches = torch.randperm(count).split(size)

    def batch(i: int):
        chosen = batches[i % len(batches)]
        return images[chosen], labels[chosen]

    step = compiled(step, options)
    if options.measure:
        return answer(step, batch(0), options.measure, (model, opt))
    print(f"{count:,} images in batches of {size}, the last of {len(batches[-1])}")
    train(step, batch, options.steps)
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(part).argmax(1) for part in test_images.split(500)])
    print(f"test accuracy {(found == test_labels).float().mean():.3f}")
    if options.compare:
        compare([sys.executable, *sys.argv], svg=options.svg)


if __name__ == "__main__":
    main()
