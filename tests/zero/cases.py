"""What the tests of ZeRO run on every rank of real gloo processes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.device_mesh import init_device_mesh

import memopt_compile as memopt
from memopt_compile import records
from memopt_compile.collectives import is_collective, waits_of, whole_bytes
from memopt_compile.step_graph import op_name

ROWS = 4  # samples a rank and step


class Uneven(nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, none at all, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 7), nn.Linear(7, 1), nn.Linear(1, 3)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.first.weight.dtype)
        return self.last(self.second(self.frozen(F.gelu(self.first(x))) * self.scale))


class Tied(nn.Module):
    """Two readers of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 5), nn.Linear(5, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.again(F.gelu(self.last(F.gelu(self.inner(F.gelu(self.first(x)))))))


def even() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8))


def batches(rank: int, ranks: int, dtype: torch.dtype, steps: int = 3) -> Iterator[tuple]:
    """The rows of this rank, in every step."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        x = torch.randn(ROWS * ranks, 6, generator=generator, dtype=dtype)
        y = torch.randint(3, (ROWS * ranks,), generator=generator)
        yield x.chunk(ranks)[rank], y.chunk(ranks)[rank]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9,
                           weight_decay=0.01)


def step_of(model: nn.Module, opt: torch.optim.Optimizer, micro: int = 1, clip: float | None = None,
            reduce: Callable = lambda p: p.grad, fold: bool = False) -> Callable:
    """An ordinary training step. `reduce` says what becomes of a gradient before it is used; with `fold`
    the optimizer takes in that of each micro-batch."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        total = 0.0
        for xs, ys in memopt.micro_batches(micro, x, y):
            loss = F.cross_entropy(model(xs), ys) / micro
            loss.backward()
            if fold:
                opt.accumulate()
            total = total + loss.detach()
        for p in model.parameters():
            if p.requires_grad and not fold:
                p.grad = reduce(p)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        opt.zero_grad()
        return total

    return step


def made(kind: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    torch._dynamo.reset()
    gc.freeze()  # as conftest before each test: else every measurement goes through all cases before
    torch.manual_seed(0)
    return kind().to(dtype)


def peaks(run: Callable, given: Iterable[tuple], resident: Any) -> list[int]:
    """Measured peak bytes of a call with each of `given`.

    Whoever of gloo's thread and ours lets go of a buffer last frees it, and what another thread frees is not
    measured. So each wait begins when gloo is done, as a rule.
    """
    call = OpOverload.__call__

    def patient(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
        if operator is torch.ops._c10d_functional.wait_tensor.default:
            time.sleep(0.01)
        return call(operator, *args, **kwargs)

    with mock.patch.object(OpOverload, "__call__", patient):
        return [memopt.measure(run, *batch, resident=resident).peak_bytes for batch in given]


def trained(rank: int, ranks: int, stage: int, kind: Callable, dtype: torch.dtype = torch.float32,
            optimizer: Callable = sgd, lowering: str = "eager", measured: int = 0, replicas: int = 1,
            accumulate: str = "gradients", budget: str | None = None, arena: bool = False,
            **how: Any) -> dict[str, Any]:
    """Some steps in a stage of ZeRO, in stage 0 with an all-reduce of each gradient."""
    model = made(kind, dtype)
    opt = optimizer(model)
    if stage:
        mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("nodes", "node"))
        memopt.shard_(model, opt, mesh if replicas > 1 else mesh["node"], stage=stage)
        step = step_of(model, opt, **how)
    else:
        name, c10d = dist.group.WORLD.group_name, torch.ops._c10d_functional
        step = step_of(model, opt, **how, reduce=lambda p: c10d.wait_tensor(
            c10d.all_reduce(p.grad, "avg", name)))
    run = torch.compile(step, backend="memopt", options={
        "zero": stage, "lowering": lowering, "accumulate": accumulate, "memory_budget": budget,
        "arena": arena})
    losses = [float(run(x, y)) for x, y in batches(rank, ranks, dtype)]
    parameters = whole(model)
    record = records.compilations(step.__code__)[-1]
    return {"losses": losses, "parameters": parameters, "kind": record.kind,
            "reason": record.reason, "calls": calls(record), "sent": sent(record), "ahead": ahead(record),
            "gathered_bytes": sum(whole_bytes(n) for n in record.step.computing()
                                  if is_collective(n) and "all_gather" in op_name(n)),
            "predicted": record.predicted_peak_bytes, "arena": memopt.report(step).arena, "counts": record.step.op_counts(),
            "measured": peaks(run, batches(rank, ranks, dtype, measured), (model, opt, record.arena.tensor)),
            "resident": memopt.measure(lambda: None, resident=(model, opt)).resident_bytes}


def alone(kind: Callable, ranks: int, optimizer: Callable = adamw, micro: int = 1,
          **how: Any) -> dict[str, Any]:
    """One process with the batches of all ranks, in float64 and eager. Its micro-batches are those of all
    ranks together."""
    model = made(kind, torch.float64)
    step = step_of(model, optimizer(model), micro, **how)
    losses = []
    for each in zip(*(batches(rank, ranks, torch.float64) for rank in range(ranks))):
        losses.append(float(step(*(torch.cat([part for parts in zip(*(x.chunk(micro) for x in of))
                                              for part in parts]) for of in zip(*each)))))
    return {"losses": losses, "parameters": whole(model)}


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for name, p in model.named_parameters()}


def calls(record: records.Compilation) -> list[str]:
    return [op_name(n) for n in record.step.computing() if is_collective(n)]


def sent(record: records.Compilation) -> list[str]:
    """The same for each tensor, whether it travels alone or in a bucket."""
    return [op_name(n).removesuffix("_coalesced") for n in record.step.computing() if is_collective(n)
            for _ in (n.args[0] if isinstance(n.args[0], list | tuple) else [n])]


def ahead(record: records.Compilation) -> int:
    """How many collectives have a product of matrices between launch and wait."""
    names = [op_name(n) for n in record.step.computing()]
    place = {n: i for i, n in enumerate(record.step.computing())}
    return sum(any("mm" in name for name in names[place[n]:min(place[w] for w in waits_of(n))])
               for n in place if is_collective(n))
