"""Activations that tensor-parallel ranks have alike, kept in parts (P_a): on real ranks."""

from __future__ import annotations

import cases
import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks, once
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import memopt_compile as memopt
from memopt_compile import records
from memopt_compile.collectives import is_collective
from memopt_compile.errors import MemoptError
from memopt_compile.step_graph import op_name


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, layers: int, dropout: float, classes: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(32, dropout) for _ in range(layers)))
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        return self.head(self.blocks(x))


def made(mesh, layers=4, dropout=0.2, dtype=torch.float64, classes=8):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(layers, dropout, classes).to(dtype)
    for block in model.blocks if mesh else ():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if classes % 2:  # this layer too, unevenly
        parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches(dtype=torch.float64, rows=256):
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        yield (torch.randn(rows, 32, generator=generator, dtype=dtype),
               torch.randint(8, (rows,), generator=generator))


def trained(mesh, layers=4, classes=8, lowering="eager", dtype=torch.float64, **options):
    model, opt = made(mesh, layers, dtype=dtype, classes=classes)
    step = cases.step_of(model, opt)
    run = memopt.compile(step, lowering=lowering, **options)
    torch.manual_seed(7)
    losses = [float(run(x, y)) for x, y in batches(dtype)]
    record = records.compilations(step.__code__)[-1]
    plan = record.step.plan
    x, y = next(batches(dtype))
    return {"losses": losses, "predicted": record.predicted_peak_bytes, "transient": record.after.transient_peak_bytes,
            "resident": record.after.resident_bytes,
            "parameters": [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()],
            "choices": {d.name: d.choice for d in plan.decisions} if plan else {}, "plan": str(plan),
            "calls": [op_name(n) for n in record.step.computing() if is_collective(n)],
            "text": record.step.text(),
            "measured": cases.peaks(run, [(x, y)] * 5, (model, opt))}


def refused(call):
    try:
        call()
    except MemoptError as error:
        return str(error)


def with_its_own(mesh, rank):
    """After a first call that was the same for all: a batch, a number, a parameter, a state and a seed of this rank's own."""
    model, opt = made(mesh, layers=1)
    torch.manual_seed(3)
    run = memopt.compile(cases.step_of(model, opt), lowering="eager", memory_budget="1GiB", partition_activations=True)
    (x, y), (again, _), _ = batches()
    run(x, y)
    with torch.no_grad():
        model.head.bias.add_(1)  # all ranks
    run(x, y)
    before = [p.detach().clone() for p in model.head.parameters()]
    said = [refused(lambda: run(again + rank, y))]
    opt.param_groups[0]["lr"] = 0.2 + rank
    said.append(refused(lambda: run(again, y)))
    opt.param_groups[0]["lr"] = 0.1
    for own in (model.head.bias, opt.state[model.head.weight]["momentum_buffer"], model.blocks[0].norm.weight):
        was = own.detach().clone()
        with torch.no_grad():
            own.add_(rank)
        said.append(refused(lambda: run(again, y)))
        with torch.no_grad():
            own.copy_(was)
    torch.manual_seed(rank)
    said.append(refused(lambda: run(again, y)))
    return said, all(torch.equal(a, b) for a, b in zip(before, model.head.parameters()))


def of_pair(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    plain = trained(mesh, recompute=False)
    resident, transient = plain["resident"], plain["transient"]

    def within(share, **options):
        return trained(mesh, memory_budget=resident + int(share * transient), **options)

    found = {"plain": plain, "parts": within(0.86, recompute=False, partition_activations=True),
             "both": within(0.35, partition_activations=True)}
    torch.manual_seed(rank)  # no longer the same numbers on all ranks
    found["refused"] = refused(lambda: trained(None, layers=1, memory_budget=0.9, partition_activations=True))
    found["uneven"] = refused(lambda: trained(mesh, layers=1, classes=9, memory_budget="1GiB", partition_activations=True))
    found["own"] = with_its_own(mesh, rank)
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return once(tmp_path_factory, "tensor parallel", lambda folder: on_ranks(2, folder, of_pair, 2))


@pytest.mark.parametrize("how", ["parts", "both"])
def test_the_same_bits(pair, how):
    """With dropout, whose masks are the same on all ranks."""
    for rank in pair:
        assert rank[how]["losses"] == rank["plain"]["losses"]
        assert all(map(torch.equal, rank[how]["parameters"], rank["plain"]["parameters"]))


def test_one_process_with_the_same_masks(pair):
    model, opt = made(None)
    step = cases.step_of(model, opt)
    torch.manual_seed(7)
    losses = [float(step(x, y)) for x, y in batches()]
    assert pair[0]["parts"]["losses"] == pytest.approx(losses, rel=1e-12)


def test_a_smaller_peak_as_predicted(pair):
    for rank in pair:
        parts, plain = rank["parts"], rank["plain"]
        assert {"keep", "partition"} <= set(parts["choices"].values()) <= {"keep", "partition", "compress"}
        assert "kept in parts by several ranks" in parts["plan"]
        assert parts["transient"] <= 0.86 * plain["transient"]
        for each in (plain, parts, rank["both"]):
            assert min(each["measured"]) == pytest.approx(each["predicted"], rel=0.01)  # gloo may free late
        assert {"partition", "recompute"} <= set(rank["both"]["choices"].values())


def test_a_gather_for_each_value_and_no_other_call(pair):
    for rank in pair:
        gathers = rank["parts"]["calls"].count("all_gather_into_tensor")
        assert gathers == list(rank["parts"]["choices"].values()).count("partition") > 0
        assert [c for c in rank["parts"]["calls"] if "gather" not in c] == rank["plain"]["calls"]
    assert pair[0]["parts"]["calls"] == pair[1]["parts"]["calls"]


def test_refused_without_layers_that_are_shared(pair):
    for rank in pair:
        assert "no parameter is shared by tensor parallelism" in rank["refused"]
        assert "parallelize_module" in rank["refused"]


def test_what_only_one_rank_has_is_an_error_before_anything_is_written(pair):
    for said, untouched in (rank["own"] for rank in pair):
        for each, name in zip(said, ("L['x']", "['lr']", "head", "state", "norm", "the state of the random generators"), strict=True):
            assert "not the same on all ranks" in each and name in each and untouched


def test_ranks_with_other_sizes_are_refused(pair):
    """Each would plan for itself, and wait for a collective that the other does not make."""
    assert all("have other sizes" in rank["uneven"] for rank in pair)
