"""A step whose gathered parameters and gradients lie in an arena is the step without one, bit for bit."""

from __future__ import annotations

from functools import partial
from unittest import mock

import cases
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import on_ranks, once, thinned
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import memopt_compile as memopt
from memopt_compile import pipelines, records
from memopt_compile.errors import OptionError
from memopt_compile.passes.place_in_arena import PlaceInArena

STAGES = thinned([1, 3])


def of_two(rank, ranks):
    with mock.patch.object(pipelines, "PlaceInArena", partial(PlaceInArena, rise=9.0)):  # for everything
        found = of_all(rank, ranks)
    # By its own judgement, which may differ between ranks: they have other rows.
    return found | {"default": cases.trained(rank, ranks, 3, cases.Uneven, arena=True, measured=10)}


def of_all(rank, ranks):
    found = {"without": cases.trained(rank, ranks, 0, cases.Uneven), "shared": shared_by(ranks),
             "budget": cases.trained(rank, ranks, 3, cases.Uneven, budget="1GiB", arena=True)}
    for stage in STAGES:
        found[stage] = cases.trained(rank, ranks, stage, cases.Uneven, arena=True, measured=10)
    for arena in (False, True):  # gradients of two micro-batches, all of them there until their norm is known
        found["clipped", arena] = cases.trained(rank, ranks, 2, cases.even, optimizer=cases.adamw, micro=2,
                                                clip=0.5, arena=arena, measured=10 * arena)
    return found


def shared_by(ranks):
    """Another batch is compiled again. A function without a whole step has nothing to plan for."""
    model = cases.made(cases.even, torch.float32)
    opt = cases.sgd(model)
    memopt.shard_(model, opt, init_device_mesh("cpu", (ranks,)), stage=3)
    step = cases.step_of(model, opt)
    run = memopt.compile(step, zero=3, arena=True, lowering="eager")
    for rows in (4, 6):
        run(torch.randn(rows, 6), torch.zeros(rows, dtype=torch.long))
    compiled = [each for each in records.compilations(step.__code__) if each.options.arena]
    try:
        memopt.compile(lambda x: F.relu(model(x)), zero=3, arena=True)(torch.randn(4, 6))
        refused = None
    except OptionError as error:
        refused = error.what
    return {"one": len({each.arena for each in compiled}) == 1 < len(compiled), "bytes": compiled[0].arena.tensor.numel(),
            "needed": [each.step.inputs[-1].nbytes for each in compiled], "report": str(memopt.report(run)),
            "arena": memopt.report(run).arena, "refused": refused}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return once(tmp_path_factory, "arena of two", lambda folder: on_ranks(2, folder, of_two, 2))


@pytest.mark.parametrize("case", [*STAGES, "budget", "default", ("clipped", True)])
def test_no_bit_changes(pair, case):
    for rank in pair:
        without = rank["clipped", False] if case == ("clipped", True) else rank["without"]
        assert rank[case]["losses"] == without["losses"]
        for name, value in without["parameters"].items():
            assert torch.equal(rank[case]["parameters"][name], value)


@pytest.mark.parametrize("case", [*STAGES, "default", ("clipped", True)])
def test_predicted_peak_is_the_measured_one(pair, case):
    """With the arena, which is there all the time. (See cases.peaks: the least counts.)"""
    above = [min(rank[case]["measured"]) - rank[case]["predicted"] for rank in pair]
    assert min(above) == 0


@pytest.mark.parametrize("case", [*STAGES, "budget", ("clipped", True)])
def test_nothing_is_gathered_beside_the_arena(pair, case):
    for rank in pair:
        assert all(call.endswith("_out") for call in rank[case]["calls"] if "gather" in call)
        arena = rank[case]["arena"]
        assert arena.nbytes >= arena.lower_bound_bytes > 0 and rank["without"]["arena"] is None


def test_steps_of_one_model_share_it(pair):
    for shared in (rank["shared"] for rank in pair):
        assert shared["one"] and shared["bytes"] == max(shared["needed"])
        assert f" for {len(shared['arena'].tenants)} tenants, at most " in shared["report"]
        assert "no step to plan an arena for" in shared["refused"]


def on_cuda(rank, ranks, place, lowering):
    """What the allocator has reserved, and the most that was allocated, without and with an arena."""
    dist.destroy_process_group()
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{place}/cuda", rank=rank, world_size=ranks)
    torch.cuda.set_device(rank)
    found = {}
    for arena in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        widths = (1024, 3000, 1500, 4000) * 3  # sizes that do not fit into each other's gaps
        model = nn.Sequential(*(m for a, b in zip(widths, widths[1:]) for m in (nn.Linear(a, b), nn.GELU())),
                              nn.Linear(widths[-1], 10)).cuda()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
        memopt.shard_(model, opt, init_device_mesh("cuda", (ranks,)), stage=3)
        run = memopt.compile(cases.step_of(model, opt), zero=3, arena=arena, lowering=lowering)
        batch = torch.randn(3000, 1024, device="cuda"), torch.arange(3000, device="cuda") % 10
        run(*batch)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        losses = [float(run(*batch)) for _ in range(3)]
        found[arena] = losses, torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        del model, opt, run
    return found


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two CUDA devices")
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_reserved_against_allocated_on_cuda(lowering, tmp_path):
    for rank in on_ranks(2, tmp_path, on_cuda, 2, tmp_path, lowering):
        (without, reserved, allocated), (with_, less, most) = rank[False], rank[True]
        print(f"reserved {reserved:,} of which {allocated:,} allocated; with an arena {less:,} and {most:,}")
        assert with_ == pytest.approx(without, rel=1e-5)
        assert less - most <= reserved - allocated
