"""Accuracy with parameters, gradients and states in few bits: ResNet on Fashion-MNIST, a small GPT.

    python tests/lpmm/accuracy.py [--model resnet|gpt] [--only NAME ...] [--seeds 3] [--first 0] [--steps N]
                                  [--micro-batches 1 4 8 16] [--sum] [--rate LR] [--lowering inductor]

Every way sees the same batches from the same first weights. The ResNet is trained by SGDM, and a row
has its accuracy on the held-out images; the GPT by AdamW, and a row has its held-out loss. With N
micro-batches each is as large as the whole batch with one, and steps are as many fewer. Their gradients are
averaged, so that an update is as large as with one; with `--sum` they are added up, as in the paper's Algorithm 1,
and with SGDM an update is N times as large. "bins" is the
mean of |θ_t − θ_(t−1)|/δ over the largest parameter and the last quarter of the steps: of how many of
its steps an element is moved at a time. With `--lowering` steps are captured whole, and gradients in 8 bits
add up in `.grad`; without it they run in eager, and add up in the optimizer's state.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from data import fashion_mnist, random_batch, shakespeare  # noqa: E402
from models import GPT, GPTConfig, ResNet  # noqa: E402

import memopt_compile as memopt  # noqa: E402

WAYS = {"fp32": None} | {f"{'/'.join(map(str, bits))} {rounding}": (*bits, rounding) for bits in (
    (12, 8, 8), (10, 8, 8), (8, 8, 8), (8, 8, 4), (12, 32, 8)) for rounding in ("stochastic", "nearest")}
# bits of parameters, gradients and states


class Images:
    steps, rate = 300, 0.05

    def __init__(self):
        self.images, self.labels, test_images, test_labels = fashion_mnist()
        self.test = list(zip(test_images.split(1000), test_labels.split(1000)))

    def model(self):
        return ResNet((8, 16))

    def optimizer(self, parameters, lr, **bits):
        return memopt.optim.SGD(parameters, lr, momentum=0.9, weight_decay=1e-4, **bits)

    def batch(self, generator):
        rows = torch.randint(len(self.images), (64,), generator=generator)
        return self.images[rows], self.labels[rows]

    def loss(self, model, x, y):
        return F.cross_entropy(model(x), y)

    @torch.no_grad()
    def result(self, model):
        model.eval()
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in self.test)
        return 100 * right / sum(len(y) for _, y in self.test)


class Plays:
    steps, rate = 300, 2e-3

    def __init__(self):
        self.ids, rest, alphabet = shakespeare()
        self.size = len(alphabet)
        generator = torch.Generator().manual_seed(0)
        self.test = [random_batch(rest, 64, 64, generator) for _ in range(8)]

    def model(self):
        return GPT(GPTConfig(self.size, 4, 128, 4, 64))

    def optimizer(self, parameters, lr, **bits):
        return memopt.optim.AdamW(parameters, lr, weight_decay=0.1, **bits)

    def batch(self, generator):
        return random_batch(self.ids, 16, 64, generator)

    def loss(self, model, x, y):
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    @torch.no_grad()
    def result(self, model):
        model.eval()
        return statistics.mean(float(self.loss(model, x, y)) for x, y in self.test)


def train(task, way, seed, steps, micro_batches, rate, lowering=None, added_up=False):
    """(held-out result, bins)."""
    torch.manual_seed(seed)
    model = task.model()
    if way is not None:
        memopt.quantize_parameters_(model, way[0], rounding=way[3], seed=seed)
    opt = task.optimizer(model.parameters(), rate, **({} if way is None else {"gradient_bits": way[1], "state_bits": way[2]}))
    share = 1 if added_up else micro_batches
    updates = max(1, steps // micro_batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda i: min(1.0, (i + 1) / 20) * (1 - i / updates))
    generator = torch.Generator().manual_seed(seed)
    largest, bins = max(model.parameters(), key=lambda p: p.numel()), []
    if lowering and way is not None:
        opt.accumulate_in_backward()

    def step(*batches):
        for x, y in batches:
            task.loss(model, x, y).div(share).backward()
            if way is not None and not lowering:
                opt.accumulate()
        opt.step()
        opt.zero_grad()

    run = step
    if lowering:
        torch._dynamo.reset()
        run = torch.compile(step, backend="memopt", options={"lowering": lowering})
    for i in range(updates):
        counted = way is not None and i >= updates * 3 // 4
        before = largest.detach().dequantize() if counted else None
        run(*(task.batch(generator) for _ in range(micro_batches)))
        schedule.step()
        if counted:
            step = largest.scales.mean() / largest.form.largest
            bins.append(float(((largest.detach().dequantize() - before).abs() / step).mean()))
    return task.result(model), statistics.mean(bins) if bins else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=("resnet", "gpt"), default="resnet")
    parser.add_argument("--only", nargs="+", default=[way for way in WAYS if "/8/8" in way or way == "fp32"], metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1], metavar="N")
    parser.add_argument("--sum", action="store_true")
    parser.add_argument("--rate", type=float, help="the learning rate at its largest")
    parser.add_argument("--lowering", choices=("eager", "inductor"))
    given = parser.parse_args()
    task = Images() if given.model == "resnet" else Plays()
    steps, rate = given.steps or task.steps, given.rate or task.rate
    print(f"{given.model}, {steps} batches, learning rate {rate}\n\n| N | way | mean | each seed | bins |\n|---|---|---|---|---|")
    for n in given.micro_batches:
        for name in given.only:
            found = [train(task, WAYS[name], seed, steps, n, rate, given.lowering, given.sum)
                     for seed in range(given.first, given.first + given.seeds)]
            results = [result for result, _ in found]
            print(f"| {n} | {name} | {statistics.mean(results):.3f} | {', '.join(f'{r:.3f}' for r in results)} | "
                  f"{statistics.mean(b for _, b in found):.4f} |", flush=True)


if __name__ == "__main__":
    main()
