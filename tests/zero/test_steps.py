"""What a step may hold besides layers, on ranks: BatchNorm, dropout that is replayed, autocast, a budget. Each stage
of ZeRO gives the numbers of data parallel bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import on_ranks, once, thinned
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import memopt_compile as memopt
from memopt_compile import records

CASES = thinned([("plain", 2), ("plain", 3), ("autocast", 3), ("scaled", 1), ("scaled", 2), ("scaled", 3)])
SHARE = 0.9  # of the peak without a budget


class Mixed(nn.Module):
    """Statistics of a rank's own samples, and a dropout that is computed again."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.inner, self.dropout, self.last = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3)

    def block(self, x):
        return self.dropout(F.gelu(self.inner(x)))

    def forward(self, x):
        return self.last(checkpoint(self.block, self.norm(self.first(x)), use_reentrant=False))


class Wide(nn.Module):
    """Activations that are larger than the parameters, of which ranks have as many rows: their plans are equal."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 4)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.tanh(F.gelu(layer(x)))
        return self.last(x)


def trained(rank, ranks, stage, kind=Mixed, rows=16, autocast=False, scaled=False, budget=None):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = kind()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    name, c10d = dist.group.WORLD.group_name, torch.ops._c10d_functional
    scaler = torch.amp.GradScaler("cpu", 300.0, 1.7, 0.6, 2, enabled=scaled)
    if stage:
        memopt.shard_(model, opt, init_device_mesh("cpu", (ranks,)), stage=stage)

    def step(x, y, factor):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(x)
        loss = F.cross_entropy(out.float(), y)
        scaler.scale(loss * factor).backward()
        if not stage:
            for p in model.parameters():
                p.grad = c10d.wait_tensor(c10d.all_reduce(p.grad, "avg", name))
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        return loss

    run = memopt.compile(step, zero=stage, lowering="eager", memory_budget=budget)
    generator = torch.Generator().manual_seed(3 + rank)
    torch.manual_seed(100 + rank)  # each rank drops for itself
    losses = []
    for i in range(3):
        factor = torch.tensor(math.inf if scaled and (i, rank) == (1, 1) else 1.0)  # one rank's gradients overflow
        losses.append(float(run(torch.randn(rows, 6, generator=generator), torch.randint(3, (rows,), generator=generator),
                                factor)))
    record = records.compilations(step.__code__)[-1]
    return {"kind": (record.kind, record.reason), "losses": losses, "peak": record.predicted_peak_bytes,
            "again": len(record.step.plan.chosen("recompute")) if record.step.plan else 0,
            "parameters": [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for p in model.parameters()],
            "buffers": list(model.buffers()), "scale": scaler.state_dict()}


def apart(rank, ranks):
    """How often a function that updates with the gradients of another is compiled, and with weights put in their place."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(6, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    memopt.shard_(model, opt, init_device_mesh("cpu", (ranks,)), stage=3)

    def gradients(x):
        weight = model[0].weight * 2
        torch.func.functional_call(model, {"0.weight": weight}, (x,)).square().mean().backward()

    def update():
        opt.step()
        opt.zero_grad()

    run = [memopt.compile(each, zero=3, lowering="eager") for each in (gradients, update)]
    for _ in range(3):
        for each in run:
            each(*[torch.ones(2, 6)][:each is run[0]])
    return [(each.kind, each.reason) for of in (gradients, update) for each in records.compilations(of.__code__)]


def of_two(rank, ranks):
    found = {(name, stage): trained(rank, ranks, stage, autocast=name == "autocast", scaled=name == "scaled")
             for name, stage in dict.fromkeys([*CASES, *((name, 0) for name, _ in CASES)])}
    for stage in (0, 3):
        found["wide", stage] = trained(rank, ranks, stage, Wide, rows=256)
    found["apart"] = apart(rank, ranks)
    found["budget", 3] = trained(rank, ranks, 3, Wide, rows=256, budget=int(SHARE * found["wide", 3]["peak"]))
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return once(tmp_path_factory, "steps", lambda folder: on_ranks(2, folder, of_two, 2))


def test_steps_are_captured_whole(pair):
    assert {each["kind"] for rank in pair for name, each in rank.items() if name != "apart"} == {("step", None)}


def test_an_update_of_its_own_is_compiled_once(pair):
    """Each gradient is another tensor. And what has been put in a parameter's place is read as it is."""
    assert [rank["apart"] for rank in pair] == 2 * [[("step", None), ("model", None)]]


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_is_data_parallel_bit_for_bit(pair, name, stage):
    for rank in pair:
        same(rank[name, stage], rank[name, 0])
    scales = [rank[name, stage]["scale"] for rank in pair]
    assert scales[0] == scales[1] and scales[0].get("scale") == ({"scaled": torch.tensor(180.0).item()}.get(name))
    means = [rank[name, stage]["buffers"][0] for rank in pair]
    assert not torch.equal(*means)  # each of its own samples


def test_a_budget_computes_again_with_the_same_numbers(pair):
    for rank in pair:
        found = rank["budget", 3]
        assert found["again"] and found["peak"] <= SHARE * rank["wide", 3]["peak"]
        same(found, rank["wide", 0])


def same(a, b):
    assert a["losses"] == b["losses"] and a["scale"] == b["scale"]
    for kind in ("parameters", "buffers"):
        assert all(map(torch.equal, a[kind], b[kind]))
