"""How far low precision strays when it is given the gradients of full precision: a ResNet on Fashion-MNIST, SGDM.

    python tests/lpmm/same_gradients.py [--updates 40] [--micro-batches 16]

One model is trained in full precision; the others take each of its micro-batches' gradients, and add them up, update and
round as `accuracy.py` has them do. Of how all parameters have moved since the first step, "along" is the share of full
precision's way that they went (1 without bias), "beside" the distance between both ends, of the length of that way: the
least, the median and the largest of the parameters.
"""

from __future__ import annotations

import argparse
import copy
import statistics

import torch
from accuracy import WAYS, Images

import memopt_compile as memopt

RATE = 0.0125  # with which gradients are added up in docs/results/lpmm.md


def followers(task: Images, model: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, torch.optim.Optimizer]]:
    """A copy of `model` and its optimizer for each way in low precision."""
    made = {}
    for name in ("12/8/8 stochastic", "8/8/8 stochastic", "8/8/8 nearest"):
        bits, gradients, states, rounding = WAYS[name]
        twin = memopt.quantize_parameters_(copy.deepcopy(model), bits, rounding=rounding)
        made[name] = twin, task.optimizer(twin.parameters(), RATE, state_bits=states, gradient_bits=gradients)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--micro-batches", type=int, default=16)
    given = parser.parse_args()
    torch.manual_seed(0)
    task = Images()
    model = task.model()
    opt, others = task.optimizer(model.parameters(), RATE), followers(task, model)
    start = [p.detach().clone() for p in model.parameters()]
    starts = {name: [p.detach().dequantize() for p in twin.parameters()] for name, (twin, _) in others.items()}
    generator = torch.Generator().manual_seed(0)
    for _ in range(given.updates):
        for _ in range(given.micro_batches):
            loss = task.loss(model, *task.batch(generator))
            grads = torch.autograd.grad(loss, list(model.parameters()))
            for p, grad in zip(model.parameters(), grads):
                p.grad = grad if p.grad is None else p.grad + grad
            for twin, theirs in others.values():
                for p, grad in zip(twin.parameters(), grads):
                    p.grad = grad.clone()
                theirs.accumulate()
        for each in (opt, *(theirs for _, theirs in others.values())):
            each.step()
            each.zero_grad()
    print("| way | along | beside |\n|---|---|---|")
    for name, (twin, _) in others.items():
        ways = [(p.detach() - s, q.detach().dequantize() - t) for p, s, q, t in zip(
            model.parameters(), start, twin.parameters(), starts[name])]
        along = [float((a * b).sum() / (a * a).sum()) for a, b in ways]
        beside = [float((b - a).norm() / a.norm()) for a, b in ways]
        print(f"| {name} | " + " | ".join(
            ", ".join(f"{f(each):.3f}" for f in (min, statistics.median, max)) for each in (along, beside)) + " |")


if __name__ == "__main__":
    main()
