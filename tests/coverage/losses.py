"""Forms of the loss layer: the smallest peak that a budget is kept with.

    python tests/coverage/losses.py [--only NAME ...] [--lowering inductor]

3,000 classes on 4 x 128 tokens of 64 features. Each loss takes a step of SGD under the smallest peak that a refusal of one byte
names: in float64, where the difference is the largest of any parameter from eager's, relative to that parameter's largest
value; and under autocast in bfloat16. Where the logits are never held whole, the peak is below their own bytes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torch.nn.functional as F
from budget import difference
from tabulate import tabulate
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

import memopt_compile as memopt  # noqa: E402

CLASSES, SAMPLES, TOKENS = 3000, 4, 128
HEAD = ("loss", "float64: peak", "measured", "difference", "bfloat16: peak", "measured")


def entropy(z: Tensor, y: Tensor, **how: Any) -> Tensor:
    return F.cross_entropy(z.reshape(-1, CLASSES), y.reshape(-1), **how)


def by_log_softmax(z: Tensor, y: Tensor) -> Tensor:
    """Log-probabilities of the targets by a loop over the samples, as TRL's losses have them in 16 bits."""
    return torch.stack([row.log_softmax(-1).gather(-1, of[:, None]).squeeze(-1) for row, of in zip(z, y)])


def by_logsumexp(z: Tensor, y: Tensor) -> Tensor:
    """The same as they have them in 32."""
    return z.gather(-1, y[..., None]).squeeze(-1) - torch.stack([row.logsumexp(-1) for row in z])


def clipped(found: Tensor, y: Tensor) -> Tensor:
    """A policy's ratio, with made-up advantages and a mask."""
    ratio, advantage, mask = torch.exp(found - found.detach() + 0.1 * (y % 3)), (y.sum(1, keepdim=True) % 5 - 2.0), y % 7 != 0
    return -(torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * mask).sum() / mask.sum()


def preference(found: Tensor, y: Tensor) -> Tensor:
    better, worse = (found * (y % 7 != 0)).sum(-1).chunk(2)
    return -F.logsigmoid(0.1 * (better - worse)).mean()


def by_halves(z: Tensor, y: Tensor) -> Tensor:
    better, worse = (-entropy(a, b, reduction="none").view(b.shape).sum(-1) for a, b in zip(z.chunk(2), y.chunk(2)))
    return -F.logsigmoid(0.1 * (better - worse)).mean()


def some_tokens(z: Tensor, y: Tensor) -> Tensor:
    """A part of each sample's tokens at a time, as torchtune has them."""
    total = torch.zeros(())
    for part, of in zip(z.chunk(8, 1), y.chunk(8, 1)):
        total = total + entropy(part, of, reduction="sum")
    return total / (y != -100).sum()


def with_entropies(z: Tensor, y: Tensor) -> Tensor:
    """Beside a loss of all rows the entropies of 128 at a time, as TRL has them; here with gradients, too."""
    z, y = z[:, :-1].reshape(-1, CLASSES), y[:, 1:].reshape(-1)
    with torch.no_grad():
        found = torch.cat([-(rows.softmax(-1) * rows.log_softmax(-1)).sum(-1) for rows in z.split(128)])
    more = torch.cat([-(rows.softmax(-1) * rows.log_softmax(-1)).sum(-1) for rows in z.split(100)])
    return (entropy(z, y, reduction="none") * (found > found.mean())).mean() - 0.01 * more.mean()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "next tokens": lambda z, y: entropy(z[:, :-1], y[:, 1:]),
    "smoothed": lambda z, y: entropy(z, y, label_smoothing=0.1),
    "with logsumexp squared": lambda z, y: entropy(z, y) + 1e-4 * z.logsumexp(-1).square().mean(),
    "capped": lambda z, y: entropy(30 * torch.tanh(z / 30), y),
    "focal": lambda z, y: ((1 - (-(e := entropy(z, y, reduction="none"))).exp()) ** 2 * e).mean(),
    "with entropies": lambda z, y: entropy(z, y) + (z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean(),
    "beside accuracy": lambda z, y: entropy(z, y) + 0 * (z.argmax(-1) == y).float().mean(),
    "of each class": lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, CLASSES).to(z.dtype)),
    "policy, by log_softmax": lambda z, y: clipped(by_log_softmax(z, y), y),
    "policy, shifted and scaled": lambda z, y: clipped(by_log_softmax(z[:, :-1] / 0.9, y[:, 1:]), y[:, 1:]),
    "policy, sliced behind log_softmax": lambda z, y: clipped(
        z.log_softmax(-1)[:, :-1].gather(-1, y[:, 1:, None]).squeeze(-1), y[:, 1:]),
    "policy, by logsumexp": lambda z, y: clipped(by_logsumexp(z, y), y),
    "preference, by logsumexp": lambda z, y: preference(by_logsumexp(z, y), y),
    "preference, by halves": by_halves,
    "some tokens at a time": some_tokens,
    "some rows at a time": lambda z, y: sum(entropy(a, b, reduction="sum") for a, b in zip(
        z.reshape(-1, CLASSES).split(100), y.reshape(-1).split(100))) / y.numel(),
    "some samples' next tokens": lambda z, y: sum(entropy(a, b) for a, b in zip(z[:, :-1].split(2), y[:, 1:].split(2))),
    "beside entropies of some rows": with_entropies,
    "each sample, weighted": lambda z, y: (torch.stack([entropy(a, b) for a, b in zip(z, y)]) * torch.arange(1, 5)).sum(),
}


def trained(loss_of: Callable, dtype: torch.dtype, options: dict[str, Any] | None
            ) -> tuple[dict[str, Tensor], Any]:
    """Parameters after a step, and its report."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    exact = dtype is torch.float64
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, CLASSES)).to(dtype if exact else torch.float32)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    x, y = torch.randn(SAMPLES, TOKENS, 32, dtype=model[0].weight.dtype), torch.randint(CLASSES, (SAMPLES, TOKENS))

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not exact):
            logits = model(x)
        loss = loss_of(logits, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    made = step if options is None else memopt.compile(step, **options)
    made(x, y)
    return {k: p.detach() for k, p in model.named_parameters()}, options and memopt.report(made)


def row(name: str, lowering: str) -> list[str]:
    found = [name]
    for dtype in (torch.float64, torch.bfloat16):
        try:
            trained(LOSSES[name], dtype, {"lowering": lowering, "memory_budget": 1})
        except memopt.InfeasibleBudget as refusal:
            smallest = refusal.smallest_peak_bytes
        parameters, report = trained(LOSSES[name], dtype, {"lowering": lowering, "memory_budget": smallest})
        found += [f"{size / 2**20:.2f}" for size in (report.predicted_peak_bytes, report.measured_peak_bytes)]
        if dtype is torch.float64:
            expected, _ = trained(LOSSES[name], dtype, None)
            found.append(f"{difference(expected, parameters):.0e}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(LOSSES), choices=list(LOSSES))
    parser.add_argument("--lowering", default="inductor", choices=("eager", "inductor"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = []
    for name in options.only:
        table.append(row(name, options.lowering))
        print(*table[-1], sep="\t", file=sys.stderr, flush=True)
    print(tabulate(table, HEAD, tablefmt="github", disable_numparse=True), flush=True)


if __name__ == "__main__":
    main()
