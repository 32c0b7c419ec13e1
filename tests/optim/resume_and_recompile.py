"""Graphs that 12 steps of a schedule take, and whether training goes on bit by bit from a checkpoint.

    python tests/optim/resume_and_recompile.py [--lowering eager|inductor|none] [--only NAME ...] [--bits 8 4]

A model with dropout is trained for 12 steps, and a checkpoint of model, optimizer, schedule and random state
is written after the 6th. New objects, compiled anew, take it up and go on for 6. Compared are the bits of
parameters, states as they are stored, learning rates, losses and the random state at the end. The schedule moves
the learning rate in every step, or that and the momentum (β₁) too.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch._dynamo.utils
from torch import Tensor, nn

import memopt_compile as memopt

optim = memopt.optim
HALF, WIDTH, PARTS = 6, 64, 2
MAKERS: dict[str, Callable] = {
    "SGD": lambda p, **kw: optim.SGD(p, lr=0.1, momentum=0.9, **kw),
    "Adam": lambda p, **kw: optim.Adam(p, amsgrad=True, weight_decay=0.1, **kw),
    "AdamW": lambda p, **kw: optim.AdamW(p, weight_decay=0.1, **kw),
    "AdamA": lambda p, **kw: optim.AdamA(p, weight_decay=0.1, micro_batches=PARTS, **kw),
    "CAME": lambda p, **kw: optim.CAME(p, lr=1e-3, weight_decay=0.1, micro_batches=PARTS, **kw),
    "Adafactor": lambda p, **kw: optim.Adafactor(p, weight_decay=0.1, **kw),
}


class Training:
    """Everything that a checkpoint is of; AdamA and CAME fold two micro-batches a step."""

    def __init__(self, make: Callable, momentum: bool, dtype: torch.dtype, compile: Callable) -> None:
        self.model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.2),
                                   nn.Linear(2 * WIDTH, WIDTH)).to(dtype)
        self.opt = make(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.opt, 2e-3, total_steps=2 * HALF + 1, cycle_momentum=momentum)
        self.dtype, self.run = dtype, compile(self.step)

    def step(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        folds = hasattr(self.opt, "accumulate")
        for some, in memopt.micro_batches(PARTS if folds else 1, x):
            loss = self.model(some).float().square().mean() / PARTS
            loss.backward()
            if folds:
                self.opt.accumulate()
            total = total + loss.detach()
        self.opt.step()
        self.opt.zero_grad()
        return total

    def train(self, steps: range) -> Iterator[Tensor]:
        """The loss of each step, whose batch is drawn by its number."""
        for i in steps:
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(i)).to(self.dtype)
            yield self.run(x).clone()
            self.schedule.step()

    def saved(self) -> io.BytesIO:
        file = io.BytesIO()
        torch.save({"random": torch.get_rng_state(), **{
            name: getattr(self, name).state_dict() for name in ("model", "opt", "schedule")}}, file)
        return file

    def load(self, file: io.BytesIO) -> None:
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        torch.set_rng_state(saved.pop("random"))
        for name, state in saved.items():
            getattr(self, name).load_state_dict(state)

    def everything(self) -> dict[str, Any]:
        states = {f"{i}.{name}": value for i, p in enumerate(self.model.parameters())
                  for name, value in self.opt.state[p].items()}
        group = self.opt.param_groups[0]
        return {**self.model.state_dict(), **states, "random": torch.get_rng_state(), "lr": group["lr"],
                "betas": group.get("betas", group.get("momentum"))}


def resumed(make: Callable, momentum: bool, lowering: str | None,
            dtype: torch.dtype = torch.float32) -> tuple[int, list[str]]:
    """How many graphs 12 steps took (0 without a compiler), and what is not bit for bit the same after a restart."""
    def compiled(step: Callable) -> Callable:
        return torch.compile(step, backend="memopt", options={"lowering": lowering}) if lowering else step

    def fresh(seed: int) -> Training:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(seed)
        return Training(make, momentum, dtype, compiled)

    first = fresh(0)
    list(first.train(range(HALF)))
    file = first.saved()
    losses = torch.stack(list(first.train(range(HALF, 2 * HALF))))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    expected = {**first.everything(), "losses": losses}
    second = fresh(1)
    second.load(file)
    again = torch.stack(list(second.train(range(HALF, 2 * HALF))))
    if lowering:
        assert memopt.report(second.run).kind == "step"
    got = {**second.everything(), "losses": again}
    assert got.keys() == expected.keys()
    return graphs, [name for name, value in expected.items() if not same(value, got[name])]


def same(a: Any, b: Any) -> bool:
    """Of one type, and equal in every bit: -0.0 is not 0.0."""
    if not isinstance(a, Tensor):
        return bool(a == b)
    return a.dtype == b.dtype and torch.equal(*(t.detach().flatten().view(torch.uint8) for t in (a, b)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lowering", choices=("eager", "inductor", "none"), default="eager")
    parser.add_argument("--only", nargs="+", choices=MAKERS, default=list(MAKERS))
    parser.add_argument("--bits", nargs="+", type=int, default=[32, 16, 8, 4])
    parser.add_argument("--weight-bits", nargs="*", type=int, default=[16, 24], help="with states of 8 bits")
    given = parser.parse_args()
    lowering = None if given.lowering == "none" else given.lowering
    print(f"lowering: {given.lowering}; graphs in 12 steps, and what is not the same after a restart")
    widths = [(bits, None) for bits in given.bits] + [(8, bits) for bits in given.weight_bits]
    for name in given.only:
        for bits, weight_bits in widths:
            found = []
            for momentum in (False, True) if name != "Adafactor" else (False,):
                make = partial(MAKERS[name], state_bits=bits, weight_bits=weight_bits)
                dtype = torch.float32 if weight_bits is None else torch.bfloat16
                graphs, other = resumed(make, momentum, lowering, dtype)
                found.append(f"{'lr, momentum' if momentum else 'lr'}: {graphs} {', '.join(other) or 'same'}")
            print(f"{name:10} {bits} bits{f', w {weight_bits}' if weight_bits else ''}  {'; '.join(found)}", flush=True)


if __name__ == "__main__":
    main()
